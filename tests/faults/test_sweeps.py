"""Sweeps whose workers, devices and nodes die."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from icl.engines.devices import Device
from icl.engines.local import WorkerPool
from icl.engines.retries import RetryPolicy
from icl.engines.run_queue import RunQueue
from icl.io.states import RunState
from icl.io.store import open_store
from icl.io.sweepfile import load_sweep
from tests.faults.chaos import SWEEP, WORKER, Place, chaos, write_sweep
from tests.faults.runs import SPEC, differences, read_saved


def test_a_sweep_survives_the_death_of_workers_and_of_itself(tmp_path: Path) -> None:
    """The long version: python -m tests.faults.chaos."""
    result = chaos(tmp_path, runs=12, workers=2, interval=2.0, sweep_kills=1, seed=1, most_kills=6)
    assert not result.faults
    assert result.equal == 12
    assert result.kills[SWEEP] == 1
    assert result.kills[WORKER] >= 2


def test_a_bad_device_takes_no_more_runs_and_spoils_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Field fault 62: here a GPU that is not there, beside a processor that is."""
    sweep, store = load_sweep(write_sweep(tmp_path, 3), store=str(tmp_path / "store")), str(tmp_path / "store")
    states = [RunState(member.name, "pending", 0, 240) for member in sweep.members]
    retries = RetryPolicy(max_worker_failures=2, longest_pause=0.0)
    queue = RunQueue(open_store(store), sweep.members, states, retries=retries)
    pool = WorkerPool(queue, [Device("cuda", "99"), Device("cpu", "0")], tmp_path, retries=retries)
    pool.train(lambda: False, 10.0, lambda status: None)
    assert [run.state.status for run in queue.runs] == ["complete"] * 3
    assert "cuda:99 takes no more runs after 2 failures in a row" in caplog.text


SLOW = {
    **SPEC,
    "training": {"total_steps": 2**20, "batch_size": 2**13},
    "run": {"checkpoint_at": {"also": [1]}, "max_chunk": 64, "save_state_every": 2**20, "grace_seconds": 300.0},
}


def test_a_request_to_a_sweep_and_its_workers_at_once_saves_every_run(tmp_path: Path) -> None:
    """As a service manager sends it to every process when a machine shuts down; chunks take longer than the sweep
    takes to pass it on."""
    file = write_sweep(tmp_path, 2, SLOW)
    place = Place(tmp_path, file, "all")
    sweep = place.start("cpu:2")
    names = [member.name for member in load_sweep(file).members]
    while not all(list(place.store.glob(f"{name}/checkpoints/step-*1.safetensors")) for name in names):
        assert sweep.poll() is None
        time.sleep(0.1)
    for pid in [sweep.pid, *place.workers()]:
        os.kill(pid, signal.SIGTERM)
    assert sweep.wait(600) == 75, (tmp_path / "all.log").read_text()
    assert all(list(place.store.glob(f"{name}/state/step-*.safetensors")) for name in names), place.logs()
    assert "again: leaving" not in place.logs()


def in_own_network(module: str, folder: Path) -> dict[str, Any]:
    """What a module of these tests tells that runs in a network namespace of its own, as root or as a user."""
    ways = ["unshare", "--user", "--map-root-user", "--net"], ["unshare", "--net"]
    way = next(way for way in ways if subprocess.run([*way, "true"], capture_output=True).returncode == 0)
    ended = subprocess.run(
        [*way, sys.executable, "-m", f"tests.faults.{module}", str(folder)],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def test_a_sweep_survives_the_death_of_a_ray_node(tmp_path: Path) -> None:
    """Two nodes in a network namespace with a loopback interface alone; one dies while it trains."""
    calm = Place(tmp_path, write_sweep(tmp_path, 4), "calm")
    assert calm.start("cpu:2").wait(300) == 0
    told = in_own_network("ray_nodes", tmp_path)
    assert len(told["attempts"]) == 2
    assert told["died"] in told["attempts"]
    for member in load_sweep(calm.file).members:
        assert not differences(read_saved(calm.store, member.name), read_saved(tmp_path / "store", member.name))


def test_a_sweep_on_ray_that_is_asked_to_stop_saves_every_run(tmp_path: Path) -> None:
    """Ray handles SIGTERM by dumping a stack, and cancels tasks whose workers are then told twice."""
    names = [member.name for member in load_sweep(write_sweep(tmp_path, 2, SLOW)).members]
    told = in_own_network("ray_stop", tmp_path)
    assert told["code"] == 75, told["said"]
    assert "SIGTERM received at" not in told["said"]
    assert all(list((tmp_path / "store" / name / "state").glob("step-*")) for name in names)
