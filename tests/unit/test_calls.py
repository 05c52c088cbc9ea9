"""Storage calls that never return: given up, named, and the process ends."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from icl.io import calls
from icl.io.calls import Calls, NoEndError
from icl.io.errors import TransientStoreError
from icl.io.store import open_store
from tests.faults.runs import SPEC, verify, write_spec

LONGEST = 2.0  # seconds; on a busy machine another call may take as long, which ends the run in the same way


def test_a_call_returns_and_raises_as_ever() -> None:
    made = Calls()
    assert made.make(divmod, 7, 2) == (3, 1)
    assert made.make(sorted, [1, 2], reverse=True) == [2, 1]
    for error in (ZeroDivisionError, TimeoutError, SystemExit):

        def fail(error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error):
            made.make(fail)
    assert made.make(divmod, 7, 2) == (3, 1)


def test_while_a_call_hangs_none_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    made, gate = Calls(), threading.Event()
    begun: list[int] = []
    monkeypatch.setattr(calls, "LONGEST_CALL_SECONDS", 0.01)
    with pytest.raises(NoEndError, match="no end of the call"):
        made.make(gate.wait)
    with pytest.raises(NoEndError, match="an earlier call without an end"):
        made.make(begun.append, 1)
    assert begun == []
    gate.set()
    made._hanging[0].join()
    monkeypatch.undo()
    made.make(begun.append, 2)
    assert begun == [2]


def test_a_call_that_gets_no_thread_has_failed_for_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a limit on processes."""

    def start(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    store = open_store(str(tmp_path))
    monkeypatch.setattr("threading.Thread.start", start)
    with pytest.raises(TransientStoreError, match=r"run/a: got no thread for a storage call"):
        store.create("run/a", b"1")


@pytest.mark.parametrize("call", ["create", "read", "list", "delete"])
def test_every_call_that_hangs_is_named_and_may_be_tried_again(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, store = threading.Event(), open_store(str(tmp_path))
    store.create("run/a", b"1")
    operations: dict[str, Callable[[], object]] = {
        "create": lambda: store.create("run/b", b"2"),
        "read": lambda: store.read("run/a"),
        "list": lambda: store.list("run"),
        "delete": lambda: store.delete("run/a"),
    }

    def hang(*_: object, **__: object) -> None:
        gate.wait()
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(calls, "LONGEST_CALL_SECONDS", 0.01)
        patch.setattr(os, "fsync", hang)
        patch.setattr(os, "fstat", hang)
        for method in ("ls", "rm_file"):
            patch.setattr(type(store._files), method, hang)
        with pytest.raises(TransientStoreError, match=r"run(/.)?: got no end of the call in 0.01 s; .* run again"):
            operations[call]()
    gate.set()
    store._calls._hanging[0].join()
    operations[call]()


HUNG = """
import os, sys, threading
from icl import run
from icl.io import calls
calls.LONGEST_CALL_SECONDS = float(sys.argv.pop(1))
fsync, flushed = os.fsync, []
def hang_in_a_state(file):
    if "/state/" in os.readlink(f"/proc/self/fd/{file}"):
        flushed.append(file)
        if len(flushed) > 2:
            threading.Event().wait()
    fsync(file)
os.fsync = hang_in_a_state
sys.exit(run.main(sys.argv[1:]))
"""


def test_a_flush_that_hangs_ends_the_run_without_a_signal(tmp_path: Path) -> None:
    """The process really ends, although a thread of it does not; what was saved is intact."""
    spec = write_spec(tmp_path / "spec.json", SPEC)
    command = [sys.executable, "-c", HUNG, str(LONGEST), str(spec), "--store", str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (4, ""), ended.stderr
    assert "Traceback" not in ended.stderr
    error = ended.stderr.splitlines()[-1]
    assert error.startswith(f"error: {tmp_path}")
    assert f"got no end of the call in {LONGEST:g} s; expected an answer." in error
    assert verify(tmp_path / "store").returncode == 0
