"""What one process can know of another: that it ended, only where its lock can be seen."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from icl.io import presence
from icl.io.presence import announced, look

ANNOUNCER = """
import sys
from icl.io import presence
with presence.announced() as process:
    print(process.token, presence.this_process(), flush=True)
    sys.stdin.read()
"""


@contextmanager
def announcer() -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """A process, and the two tokens that it has announced."""
    command = [sys.executable, "-c", ANNOUNCER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split()
        finally:
            process.kill()


def test_a_process_is_alive_until_it_is_killed() -> None:
    with announcer() as (process, tokens):
        assert len(tokens) == 2
        assert [look(token) for token in tokens] == ["alive", "alive"]
        assert [look(token) for token in tokens] == ["alive", "alive"], "looking changes nothing"
        process.kill()
        process.wait()
        assert [look(token) for token in tokens] == ["ended", "ended"]
        assert [look(token) for token in tokens] == ["ended", "ended"], "whoever looks next sees the same"
        for token in tokens:
            os.unlink(presence._path(token))


def test_a_process_that_ends_well_leaves_nothing() -> None:
    with announcer() as (process, tokens):
        process.communicate()
        assert process.returncode == 0
        assert [look(token) for token in tokens] == ["unknown", "unknown"]


def test_a_lock_may_be_left_free_and_no_program_that_was_started_meanwhile_holds_it() -> None:
    with announced() as process:
        token, process.remembered = process.token, True
        other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        assert look(token) == "alive"
    try:
        assert look(token) == "ended"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        os.unlink(presence._path(token))


@pytest.mark.parametrize("token", [None, 7, "", "x", "../../etc/passwd", "0" * 15, "0" * 17, "0123456789abcdeF"])
def test_what_is_no_token_is_unknown(token: object) -> None:
    assert look(token) == "unknown"


def test_a_token_of_elsewhere_is_unknown() -> None:
    """As on another machine, in another container, after a restart: its lock is not here."""
    assert look("0123456789abcdef") == "unknown"


def test_a_lock_that_may_not_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    with announced() as process:
        monkeypatch.setattr(os, "open", refuse)
        assert look(process.token) == "unknown"


def test_where_there_is_no_such_memory_nothing_is_ever_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_FOLDER", "/nowhere")
    with announced() as process:
        assert look(process.token) == "unknown"
    assert look(process.token) == "unknown"


def test_a_lock_that_cannot_be_taken_is_not_left_for_others_to_find_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", refuse)
        held = announced()
        token = held.__enter__().token
    assert look(token) == "unknown"
    held.__exit__(None, None, None)
