"""Requests to stop: how many are one, what comes after, and that nobody has to hear of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from icl.stopping import StopRequest, handlers_kept, interruptible
from tests.readers import stderr_that_nobody_reads

SCRIPT = """
import os, signal, sys, threading
from icl import stopping

said = []
say = stopping._say
stopping._say = lambda line: (said.append(line), say(line))
stopping._ONE_REQUEST_SECONDS = float(sys.argv[1])

def until(condition):
    while not condition():
        threading.Event().wait(0.01)

def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)

with stopping.StopRequest({grace}, {watchdog}) as should_stop:
    {does}
sys.exit(9)
"""


def script(does: str, window: float, grace: float = 600, watchdog: float | None = None) -> list[str]:
    """A command that asks itself to stop; signals within `window` seconds are one request."""
    return [sys.executable, "-c", SCRIPT.format(does=does, grace=grace, watchdog=watchdog), str(window)]


TWICE = "send(); until(should_stop); send(signal.SIGINT); "


def test_signals_at_one_time_are_one_request() -> None:
    """As a service manager, `timeout` or a terminal sends it to several processes, of which some pass it on."""
    does = TWICE + "send(); should_stop.ask(); until(lambda: len(said) > 1); send(); should_stop.ask()"
    ended = subprocess.run(script(does, window=1e9), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 9
    assert ended.stderr.count("saving at the end of this chunk") == 1
    assert ended.stderr.count("asked to stop already, and saving; again in ") == 1


def test_a_signal_that_comes_clearly_later_means_now() -> None:
    ended = subprocess.run(
        script(TWICE + "until(lambda: False)", window=0), capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 128 + signal.SIGINT
    assert "SIGINT again: leaving; run again to go on" in ended.stderr


def test_asking_by_a_call_is_never_a_second_signal() -> None:
    """A worker is asked by the end of its stdin, before or after a signal that it got itself."""
    does = "should_stop.ask(); until(should_stop); should_stop.ask(); send(); should_stop.ask()"
    ended = subprocess.run(script(does, window=0), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 9
    assert "asked to stop: saving at the end of this chunk" in ended.stderr


@pytest.mark.parametrize("reader", ["gone", "asleep", "no stderr"])
@pytest.mark.parametrize(
    ("does", "grace", "watchdog", "code"),
    [
        ("until(lambda: False)", 600, 0.1, 75),
        ("send(); until(lambda: False)", 0.1, None, 75),
        (TWICE + "until(lambda: False)", 600, None, 128 + signal.SIGINT),
    ],
    ids=["watchdog", "grace", "second"],
)
def test_a_stderr_that_is_gone_disarms_nothing(
    does: str, grace: float, watchdog: float | None, code: int, reader: str
) -> None:
    with stderr_that_nobody_reads(reader) as stderr:
        command = script(does, 0, grace, watchdog)
        assert subprocess.run([*stderr.shell, *command], stderr=stderr.fd, timeout=120).returncode == code


@pytest.fixture
def sigint() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
def test_an_interrupt_is_noted_and_a_users_own_handler_put_back() -> None:
    calls = []

    def own(number: int, frame: object) -> None:
        calls.append(number)

    signal.signal(signal.SIGINT, own)
    with interruptible() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
    assert interrupted()
    assert calls == []
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.usefixtures("sigint")
def test_a_second_interrupt_is_raised_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("sigint")
def test_interrupts_that_are_ignored_stay_so() -> None:
    """As in a process that a shell has put into the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible() as should_stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert not should_stop()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_thread_handles_no_interrupts() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with interruptible() as should_stop:
            found.extend([should_stop(), signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, before]


@pytest.mark.usefixtures("sigint")
def test_handlers_survive_a_library_that_takes_them() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with handlers_kept():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


def test_any_time_that_a_spec_may_give_is_waited_for() -> None:
    """Also what the system's clock has no number for; a thread that dies of it would hear no signal."""
    with StopRequest(grace_seconds=1e300, watchdog_seconds=1e300) as should_stop:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not should_stop() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert should_stop()
