"""The local engine, and what goes wrong between it and its workers."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from icl.core.errors import BackendUnavailableError
from icl.engines.devices import Device
from icl.engines.local import WorkerPool
from icl.engines.retries import RetryPolicy
from icl.engines.run_queue import RunQueue
from icl.io.states import RunState
from icl.io.store import open_store
from icl.io.sweepfile import load_sweep
from tests.faults.chaos import write_sweep


def pool(folder: Path, devices: int = 1, runs: int = 1) -> tuple[WorkerPool, RunQueue]:
    sweep = load_sweep(write_sweep(folder, runs), store=str(folder / "store"))
    states = [RunState(member.name, "pending", 0, member.spec.training.total_steps) for member in sweep.members]
    retries = RetryPolicy(max_worker_failures=4, longest_pause=0.0)
    queue = RunQueue(open_store(str(folder / "store")), sweep.members, states, retries=retries)
    some = [Device("cpu", str(index)) for index in range(devices)]
    return WorkerPool(queue, some, folder, retries=retries), queue


def refuse(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Have that many processes refused, as by a limit on their number."""
    begin, left = subprocess.Popen, [times]

    def popen(*arguments: Any, **options: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return begin(*arguments, **options)

    monkeypatch.setattr("icl.engines.worker.subprocess.Popen", popen)


def test_a_worker_that_could_not_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, times=3)
    some, queue = pool(tmp_path)
    some.train(lambda: False, 60.0, lambda status: None)
    assert [run.state.status for run in queue.runs] == ["complete"]
    assert "cpu:0: worker: got no process ([Errno 11] Resource temporarily unavailable)" in caplog.text


def test_a_device_that_never_gets_a_worker_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, times=1000)
    some, queue = pool(tmp_path, devices=2)
    some.train(lambda: False, 60.0, lambda status: None)
    assert [run.state.status for run in queue.runs] == ["stopped"], "not the run's fault"
    assert "takes no more runs after 4 failures in a row" in caplog.text


def test_whatever_a_serving_thread_raises_ends_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here on two devices, of which the second may be in the middle of a run."""
    some, queue = pool(tmp_path, devices=2, runs=2)

    def record_ending(run: object, ending: object) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(queue, "record_ending", record_ending)
    with pytest.raises(KeyError, match="unforeseen"):
        some.train(lambda: False, 60.0, lambda status: None)
    assert "KeyError: 'unforeseen'; the sweep stops" in caplog.text
    assert all(slot.worker is None or slot.worker._process.poll() is not None for slot in some.slots)


def test_threads_that_are_not_to_be_had_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    some, _ = pool(tmp_path)
    monkeypatch.setattr("threading.Thread.start", start)
    with pytest.raises(BackendUnavailableError, match=r"--devices: got no thread .*expected 1. Name fewer devices"):
        some.train(lambda: False, 60.0, lambda status: None)


def test_the_status_says_how_fast_it_goes(tmp_path: Path) -> None:
    some, _ = pool(tmp_path)
    shown: list[dict[str, Any]] = []
    some.train(lambda: False, 60.0, shown.append)
    assert shown[0]["pace"] == {"steps_per_second": None, "seconds_left": None}
    assert some.slots[0].trained == 240
    assert shown[-1]["workers"][0]["steps_per_second"] is None, "it is idle"
    slot = some.slots[0]
    assert slot.ticks[-1][1] == 240
