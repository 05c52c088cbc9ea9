"""A worker process, and what asks it to stop."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import orjson
import pytest

from icl.attempt import Ending
from icl.core.spec import Spec
from icl.engines.devices import Device
from icl.engines.worker import WorkerProcess
from icl.exit_codes import ExitCode
from icl.io.codec import spec_from_data, spec_to_data
from icl.io.manifest import saved_steps
from icl.io.names import run_name
from icl.io.store import open_store
from tests.faults.runs import SPEC

SECONDS = 300.0


def long_spec(store: Path) -> Spec:
    """One whose chunks take a second, so that a request to stop is answered long after it came."""
    training = {"total_steps": 2**20, "batch_size": 2**12}
    run = {**SPEC["run"], "store": str(store), "save_state_every": 2**20, "max_chunk": 64, "grace_seconds": SECONDS}
    return spec_from_data({**SPEC, "training": training, "run": run})


def begin(folder: Path) -> WorkerProcess:
    with (folder / "log").open("ab") as log:
        return WorkerProcess(Device("cpu", "0").environment(), log)


@pytest.mark.parametrize("asked", ["stop and close", "signal and stop and close", "stop and signal and close"])
def test_requests_that_come_together_save_the_run(tmp_path: Path, asked: str) -> None:
    """As when a machine shuts down, whose sweep passes on what its workers have been told as well."""
    spec = long_spec(tmp_path / "store")
    worker = begin(tmp_path)
    endings: list[Ending] = []
    begun = threading.Event()
    arguments = {"allow_backend_change": False, "progress": lambda step: begun.set()}
    thread = threading.Thread(target=lambda: endings.append(worker.ask(spec, **arguments)))  # type: ignore[arg-type]
    thread.start()
    assert begun.wait(SECONDS)
    for word in asked.split(" and "):
        if word == "signal":
            os.kill(worker.pid, signal.SIGTERM)
        elif word == "stop":
            worker.stop()
    code = worker.close(SECONDS)
    thread.join(SECONDS)
    (ending,) = endings
    assert (ending.code, ending.status, ending.error) == (ExitCode.INTERRUPTED, "interrupted", None), (
        tmp_path / "log"
    ).read_text()
    assert code == ExitCode.INTERRUPTED
    assert ending.step
    assert max(saved_steps(open_store(str(tmp_path / "store")), run_name(spec), "state")) == ending.step


def test_a_worker_whose_stdin_has_ended_does_not_train_to_the_end(tmp_path: Path) -> None:
    """It ends before the run begins, as when a sweep is killed at that moment."""
    request = {"spec": spec_to_data(long_spec(tmp_path)), "allow_backend_change": False}
    command = [sys.executable, "-m", "icl.engines.worker"]
    ended = subprocess.run(command, input=orjson.dumps(request) + b"\n", capture_output=True, timeout=SECONDS)
    assert ended.returncode == ExitCode.INTERRUPTED
