"""SIGTERM and SIGINT: the first asks to stop and ends the process if that takes too long; the second ends it.

A process that hangs without a signal, as on a chip that was taken away, may be ended as well.
Nothing saved is torn by an exit at any moment, so leaving in the middle costs at most the steps since the last save.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from icl.exit_codes import ExitCode

_NUMBERS = (signal.SIGTERM, signal.SIGINT)
_ASKED = 0  # in place of a signal's number: asked by a call
# Signals within so many seconds are one request that several send at once: a service manager to every process of a
# service, `timeout` to a process and to its group, a terminal to all in front. They arrive within milliseconds of each
# other, and on a machine that swaps within a second; nobody who means "now" waits much longer than this.
_ONE_REQUEST_SECONDS = 2.0
_TELLING_SECONDS = 1.0  # for a line about what is done anyway


class StopRequest:
    """Whether somebody asked this process to stop while inside; to be entered in the main thread.

    Args:
        grace_seconds: how long after being asked to stop the process may go on.
        watchdog_seconds: how long it may go on without calling this, asked to stop or not; None for ever.
    """

    def __init__(self, grace_seconds: float, watchdog_seconds: float | None = None) -> None:
        self._grace_seconds, self._watchdog_seconds = grace_seconds, watchdog_seconds
        self._called = time.monotonic()
        self._event = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def __enter__(self) -> "StopRequest":
        # Python runs a signal's handler between two steps of the main thread, which a compilation holds up for long.
        # The number of the signal is written to this socket at once, and another thread reads it there.
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in _NUMBERS}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="icl-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._writer.close()  # which ends the thread
        self._thread.join()
        self._reader.close()

    def __call__(self) -> bool:
        """Whether this process was asked to stop."""
        self._called = time.monotonic()
        return self._event.is_set()

    def ask(self) -> None:
        """Ask this process to stop, from any thread; however often, before or after a signal, it is one request."""
        with suppress(OSError):  # it is over, or asked so often that there is no room to ask once more
            self._writer.send(bytes([_ASKED]))

    def _watch(self) -> None:
        received = self._next(self._watchdog_seconds, lambda: self._called)
        if received == []:
            _leave(
                ExitCode.INTERRUPTED, f"nothing has ended in {self._watchdog_seconds:g} s: leaving; run again to go on"
            )
        if received is None:
            return
        self._event.set()
        asked_at = time.monotonic()
        first, told = asked_at if any(received) else None, False  # a request without a signal has no second
        name = signal.Signals(max(received)).name if any(received) else "asked to stop"
        _say(f"{name}: saving at the end of this chunk")
        while received := self._next(self._grace_seconds, lambda: asked_at):
            number, now = max(received), time.monotonic()
            if number == _ASKED:
                continue
            if first is None:
                first = now
                continue
            left = first + _ONE_REQUEST_SECONDS - now
            if left <= 0:
                _leave(128 + number, f"{signal.Signals(number).name} again: leaving; run again to go on")
            if not told:
                told = True
                _say(f"asked to stop already, and saving; again in {left:.1f} s ends it at once")
        if received is not None:
            _leave(
                ExitCode.INTERRUPTED,
                f"no chunk ended and was saved within {self._grace_seconds:g} s: leaving; run again to go on",
            )

    def _next(self, seconds: float | None, since: Callable[[], float]) -> list[int] | None:
        """The requests that have come; none when it takes longer than so many seconds; None when none can come."""
        while True:
            left = None if seconds is None else since() + seconds - time.monotonic()
            if left is not None and left <= 0:
                return []
            self._reader.settimeout(None if left is None else min(left, threading.TIMEOUT_MAX))
            try:
                received = self._reader.recv(4096)
            except TimeoutError:
                continue
            if not received:
                return None
            if found := [number for number in received if number in (_ASKED, *_NUMBERS)]:
                return found


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Have the signals that ask to stop handled as before by whatever is done inside."""
    handlers = {number: signal.getsignal(number) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # which was not set by Python
                signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed inside, or a notebook's kernel interrupted; also to be asked afterwards.

    A second time raises KeyboardInterrupt at once. The handler that was there before is put back. In a thread that is
    not the main one, where no signal arrives, nothing is done.
    """
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: False
        return
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        _say("interrupted: saving at the end of this chunk; once more stops at once and saves nothing")

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(code: int, line: str) -> NoReturn:
    _say(line)
    os._exit(code)


def _say(line: str) -> None:
    """Say something in a thread of its own, since a reader that is gone or asleep must hold nobody up."""

    def say() -> None:
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)

    with suppress(RuntimeError):  # no more threads are to be had
        teller = threading.Thread(target=say, daemon=True)
        teller.start()
        teller.join(_TELLING_SECONDS)
