"""A sweep's folder on one machine, with files in it that nobody of ours wrote."""

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from icl.engines.session import Session, session_of

_WORKER = {"device": "cpu:0", "run": None, "note": ""}
_STATUS: dict[str, Any] = {"counts": {"complete": 1}, "workers": [_WORKER]}


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


def test_a_status_that_was_written_is_read(session: Session) -> None:
    session.write_status(_STATUS)
    assert session.read_status() == _STATUS


_WRONG: tuple[Any, ...] = (None, 1, [1], [{}], {"x": "y"})


@pytest.mark.parametrize("status", [None, [], {}, 1, *({**_STATUS, key: to} for key in _STATUS for to in _WRONG)])
def test_a_status_of_another_form_is_none(session: Session, status: object) -> None:
    (session.folder / "status.json").write_bytes(orjson.dumps(status))
    assert session.read_status() is None


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, os.mkfifo, lambda path: path.write_bytes(b"{")])
def test_a_status_that_is_no_file_of_json_is_none(session: Session, make: Callable[[Path], object]) -> None:
    make(session.folder / "status.json")
    assert session.read_status() is None


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "9" * 30, "9" * 5000, "٣", "1 2"])
def test_a_process_that_cannot_be_one_is_not_stopped(
    session: Session, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """0 would be everybody in this process's group."""
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail(f"signal {number} to process {pid}"))
    with (session.folder / "pid").open("w+") as file:
        file.write(text)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert session.pid() is None
        assert session.stop() is False


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_pid_that_is_no_file_is_nobodys(session: Session, make: Callable[[Path], object]) -> None:
    make(session.folder / "pid")
    assert session.pid() is None


def test_a_process_that_has_just_ended_needs_no_stop(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGTERM)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    with session.locked():
        assert session.stop() is False


@pytest.mark.parametrize("letter", ["y", "é", "語", "🙂"])
def test_a_sweep_may_have_the_longest_name_that_a_file_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letter: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stem = letter * (250 // len(letter.encode()))
    (tmp_path / f"{stem}.json").touch()
    sessions = [session_of(f"{stem}-{digest}", str(tmp_path)) for digest in ("0" * 12, "1" * 12)]
    for session in sessions:
        with session.locked():
            assert session.pid() == os.getpid()
    assert sessions[0] != sessions[1]
