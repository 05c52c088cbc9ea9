"""`python -m icl.sweep`: what it says, how it ends, and how it goes on without a terminal."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from icl.engines.session import Session, session_of
from icl.io.names import run_name
from icl.io.sweepfile import load_sweep
from icl.results import load_run
from icl.sweep import main
from tests.faults.runs import SPEC

LONG: dict[str, Any] = {**SPEC, "training": {"total_steps": 2**24, "batch_size": 8}}


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def write(folder: Path, base: dict[str, Any] = SPEC, runs: int = 2) -> list[str]:
    """Arguments for a small sweep."""
    file = folder / "some.json"
    file.write_text(json.dumps({"base": base, "grid": {"seeds.init": {"from": 0, "to": runs - 1}}}))
    return [str(file), "--store", str(folder / "store")]


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_sweep_is_trained_and_listed_and_then_complete(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = write(tmp_path)
    assert main([*arguments, "--list"]) == 1
    assert capfd.readouterr().out.count("pending") == 2
    assert main([*arguments, "--devices", "cpu:2"]) == 0
    first = capfd.readouterr()
    assert first.out == "2 complete\n"
    assert main([*arguments, "--list"]) == 0
    listed = capfd.readouterr().out.splitlines()
    sweep = load_sweep(arguments[0])
    for line, member in zip(listed, sweep.members, strict=True):
        assert line.split() == [member.name, "complete", "240/240", f"init={member.spec.seeds.init}"]
    folder = session_of(sweep.name, arguments[2]).folder
    logs = {log.name: log.read_text() for log in folder.glob("cpu-*.log")}
    assert main(arguments) == 0
    assert {log.name: log.read_text() for log in folder.glob("cpu-*.log")} == logs, "nothing was started"
    for number, member in enumerate(sweep.members):
        (attempt,) = load_run(arguments[2], member.name).attempts()
        pinned = attempt["environment"]
        assert pinned["ICL_WORKER"] in ("cpu:0", "cpu:1")
        assert pinned["OMP_NUM_THREADS"] == "1"
        assert attempt["backend"]["threads"] == "1", number
    assert "".join(logs.values()).count(": complete\n") == 2


def test_shards_are_disjoint_and_together_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = write(tmp_path, runs=3)
    names = []
    for shard in ("0/2", "1/2"):
        main([*arguments, "--shard", shard, "--list"])
        names += [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert sorted(names) == sorted(member.name for member in load_sweep(arguments[0]).members)


@pytest.mark.parametrize(
    ("extra", "code", "said"),
    [
        (["--devices", "gpu:1"], 2, "error: --devices: got 'gpu:1'; expected such as tpu:0-3"),
        (["--devices", "tpu:0"], 3, "error: --devices: got tpu:0; expected a machine that has one"),
        (["--wandb-sweep", "me/icl/x"], 2, "error: --wandb-sweep: got it with --engine local; expected wandb."),
        (["--engine", "ray", "--devices", "cpu:2"], 2, "expected cpu, cuda or tpu with --engine ray"),
    ],
)
def test_mistakes_have_one_clear_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], extra: list[str], code: int, said: str
) -> None:
    assert main([*write(tmp_path), *extra]) == code
    errors = capfd.readouterr().err
    assert said in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("backend", "devices"), [("cuda", "cpu:1"), ("xla", "cuda:all"), ("tpu9", "cpu:1")])
def test_a_backend_that_cannot_run_on_the_devices_is_refused(
    tmp_path: Path, backend: str, devices: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Never another device than asked, by any engine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    arguments = write(tmp_path, {**SPEC, "run": {**SPEC["run"], "backend": backend}})
    for given in (["--devices", devices], ["--engine", "ray", "--devices", devices.partition(":")[0]]):
        assert main([*arguments, *given]) == 2
        errors = capfd.readouterr().err
        assert f"error: run.backend: got '{backend}'" in errors
        assert "Traceback" not in errors
    assert not list((tmp_path / "store").glob("*"))


def test_a_state_home_that_cannot_be_used_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A full disk refuses the same calls with other words."""
    arguments = [*write(tmp_path), "--devices", "cpu:1"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    for extra in ([], ["--detach"]):
        assert main([*arguments, *extra]) == 4
        assert "Not a directory; expected a folder that can be written" in capfd.readouterr().err
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user without HOME and without an entry
    assert main(arguments) == 4
    assert "Set HOME, or XDG_STATE_HOME" in capfd.readouterr().err
    assert main([*arguments, "--list"]) == 1, "which needs no home"


def test_a_disk_that_is_full_ends_no_sweep(tmp_path: Path) -> None:
    """What cannot be shown is not; the store has other ways to say that it is full."""
    session = Session(tmp_path / "session")
    with session.locked():
        (session.folder / "status.json").mkdir()
        session.write_status({"counts": {}})


def test_a_run_that_no_machine_can_hold_is_refused_before_any_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = write(tmp_path, {**SPEC, "model": {"num_heads": 1, "embed_dim": 2**31 - 1}})
    assert main([*arguments, "--devices", "cpu:2"]) == 2
    assert capfd.readouterr().err.count("memory: got at least") == 2
    assert not any((tmp_path / "state").rglob("cpu-*.log"))


@pytest.mark.parametrize("arguments", [["--shard", "2/2"], ["--shard", "x"], ["--max-attempts", "0"]])
def test_bad_usage_ends_with_code_2(tmp_path: Path, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*write(tmp_path), *arguments])
    assert caught.value.code == 2
    assert "expected" in capfd.readouterr().err


def test_a_run_that_cannot_succeed_fails_once_and_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    diverging = {**SPEC["training"], "schedule": {"name": "constant", "learning_rate": 1e38}}
    arguments = write(tmp_path, {**SPEC, "training": diverging}, runs=1)
    assert main([*arguments, "--devices", "cpu:1"]) == 1
    assert "failed at step 0: training loss: got" in caplog.text
    capfd.readouterr()
    assert main([*arguments, "--devices", "cpu:1"]) == 1, "not tried again unasked"
    assert main([*arguments, "--list"]) == 1
    assert "NonFiniteLossError: training loss: got" in capfd.readouterr().out
    run = load_run(arguments[2], load_sweep(arguments[0]).members[0].name)
    assert len(run.attempts()) == 1
    assert main([*arguments, "--devices", "cpu:1", "--retry-failed"]) == 1
    assert len(run.attempts()) == 2


def test_a_detached_sweep_is_watched_and_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has no terminal, is refused a double, and leaves every run saved and no process behind."""
    arguments = write(tmp_path, LONG)
    names = [member.name for member in load_sweep(arguments[0]).members]
    session = session_of(load_sweep(arguments[0]).name, arguments[2])
    command = [sys.executable, "-m", "icl.sweep", *arguments]
    begun = subprocess.run([*command, "--devices", "cpu:2", "--detach"], capture_output=True, text=True)
    assert begun.returncode == 0, begun
    pid = session.pid()
    assert pid is not None
    try:
        assert os.getsid(pid) == pid
        wait_for(lambda: sum(1 for _ in tmp_path.glob("store/*/state/step-*")) >= 2 * len(names))
        assert main(arguments) == 2
        assert f"process {pid} runs here" in capfd.readouterr().err
        with subprocess.Popen([*command, "--attach"], stderr=subprocess.PIPE, text=True) as watching:
            assert watching.stderr is not None
            assert watching.stderr.readline() == "2 runs: 2 running\n"
            assert main([*arguments, "--list"]) == 1
            assert capfd.readouterr().out.count("  running  ") == 2
            workers = [worker["pid"] for worker in (session.read_status() or {})["workers"]]
            assert main([*arguments, "--stop"]) == 0
            assert watching.wait(60) == 1
        assert "stopped, every run saved" in capfd.readouterr().out
        assert session.pid() is None
        assert not any(os.path.exists(f"/proc/{worker}") for worker in workers)
        for name in names:
            assert load_run(arguments[2], name).attempts()[-1]["status"] == "interrupted"
        assert main([*arguments, "--stop"]) == 0
        assert "no process runs this sweep here" in capfd.readouterr().out
    finally:
        session.stop()


def test_a_detached_sweep_that_cannot_begin_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = write(tmp_path)
    assert main([*arguments, "--devices", "tpu:0", "--detach"]) == 3
    assert "ended with exit code 3; see " in capfd.readouterr().err


def test_the_spec_that_a_worker_trains_has_the_name_in_the_list(tmp_path: Path) -> None:
    for member in load_sweep(write(tmp_path)[0]).members:
        assert run_name(member.spec) == member.name


@pytest.mark.parametrize("more", [[], ["--list"]])
def test_a_shard_without_a_run_is_complete(tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert main([*write(tmp_path, runs=2), "--shard", "2/3", *more]) == 0
    assert capfd.readouterr().out == "0 runs: there are fewer runs than shards\n"
