"""W&B, with its own client, against a server of ours that answers, refuses, stalls or is not there."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from icl.core.plan import build_plan
from icl.io.codec import spec_from_data, spec_to_data
from icl.io.names import run_name
from icl.io.sweepfile import load_sweep
from icl.results import load_run
from tests.faults.runs import SPEC, finish, wait_until
from tests.forked import READ_ONCE, Forked, python
from tests.loopback import free_port
from tests.wandb_server import ENTITY, ServedRun, WandbServer, wandb_server

TRACKED: dict[str, Any] = {**SPEC, "run": {**SPEC["run"], "wandb": {"project": "icl"}}}
SLOW: dict[str, Any] = {**TRACKED, "training": {"total_steps": 1500, "batch_size": 512}}  # than W&B is to begin
LONG: dict[str, Any] = {**TRACKED, "training": {"total_steps": 100_000, "batch_size": 8}}
NAME = run_name(spec_from_data(SPEC))


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandb_server() as running:
        yield running
        assert not running.unknown


def start(folder: Path, spec: dict[str, Any], environment: dict[str, str], command: list[str] | None = None) -> Forked:
    """`python -m icl.run` or another command of Python, with its W&B folder and home in `folder`."""
    (folder / "spec.json").write_text(json.dumps(spec))
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return python(
        *(command or ["-m", "icl.run", str(folder / "spec.json"), "--store", str(folder / "store")]),
        log=folder / "log",
        cwd=folder,
        environment={**clean, **READ_ONCE, "HOME": str(folder), **environment},
    )


def steps_in(run: ServedRun) -> list[int]:
    return [row["step"] for row in run.history()]


def assert_whole(run: ServedRun, spec: dict[str, Any], store: Path) -> None:
    """Every planned step once, in order, with the values of the store."""
    parsed = spec_from_data(spec)
    plan, rows = build_plan(parsed), load_run(str(store), run_name(parsed))._directory.metrics()
    assert steps_in(run) == sorted({*plan.log, *plan.evaluate})
    for row in run.history():
        ours = {key: value for key, value in row.items() if not key.startswith("_") and key != "step"}
        assert ours == rows[row["step"]]


def test_a_run_is_mirrored_whole(tmp_path: Path, server: WandbServer) -> None:
    name = run_name(spec_from_data(SLOW))
    assert finish(start(tmp_path, SLOW, server.environment))[0] == 0
    (run,) = server.runs.values()
    assert run.id == name
    assert_whole(run, SLOW, tmp_path / "store")
    assert run.state == "finished"
    told = run.told()
    assert told["task"]["num_tasks"] == 5
    assert (told["icl"]["run"], told["icl"]["store"]) == (name, str(tmp_path / "store"))
    (attempt,) = load_run(str(tmp_path / "store"), name).attempts()
    assert attempt["wandb"] == {"entity": None, "project": "icl", "id": name, "sweep": None, "mode": "online"}
    assert attempt["wandb_url"].endswith(f"/{ENTITY}/icl/runs/{name}")


UNTIL = """
import os, sys, time
from icl.io.codec import load_spec, with_run
from icl.loop import execute
spec, store, last, gate = sys.argv[1:]
reached = False
def progress(step, row):
    global reached
    while step >= int(last) and not os.path.exists(gate):
        time.sleep(0.01)
    reached = step >= int(last)
print(execute(with_run(load_spec(spec), store=store), should_stop=lambda: reached, progress=progress).status)
"""


def test_resumed_history_has_no_holes_and_no_repeats(tmp_path: Path, server: WandbServer) -> None:
    """Field faults 50 and 58: killed beyond its last state, stopped, trained without W&B, and whole in one W&B run."""

    def train_until(step: int, **environment: str) -> Forked:
        """A process that trains to a step, and stops there as soon as the gate is open."""
        given = [str(tmp_path / "spec.json"), str(tmp_path / "store"), str(step), str(gate)]
        return start(tmp_path, TRACKED, {**server.environment, **environment}, ["-c", UNTIL, *given])

    def rows() -> int:
        return len(server.runs.get(NAME, ServedRun("")).history())

    gate = tmp_path / "gate"
    process = train_until(100)
    wait_until(lambda: rows() >= 30, process)
    process.kill()
    finish(process)
    states = [int(path.stem[5:]) for path in tmp_path.glob("store/*/state/step-*")]
    assert max(states) <= 100
    gate.touch()
    dead = f"http://127.0.0.1:{free_port()}"
    assert finish(train_until(150, WANDB_BASE_URL=dead)) == (0, "interrupted\n")
    assert rows() < 45
    gate.unlink()
    process = train_until(200)
    wait_until(lambda: rows() >= 60, process)
    gate.touch()
    assert finish(process) == (0, "interrupted\n")
    assert server.runs[NAME].state == "preempted"
    assert finish(start(tmp_path, TRACKED, server.environment))[0] == 0
    assert_whole(server.runs[NAME], TRACKED, tmp_path / "store")
    assert server.runs[NAME].state == "finished"
    assert list(server.runs) == [NAME]


def test_a_complete_run_brings_w_and_b_up_to_date(tmp_path: Path, server: WandbServer) -> None:
    assert finish(start(tmp_path, SPEC, {}))[0] == 0
    code, said = finish(start(tmp_path, TRACKED, server.environment))
    assert (code, json.loads(said)["status"]) == (0, "already_complete")
    assert_whole(server.runs[NAME], TRACKED, tmp_path / "store")


@pytest.mark.parametrize("behaviour", ["refuse", "stall", "dead", "no account"])
def test_a_server_that_fails_never_stops_training(tmp_path: Path, server: WandbServer, behaviour: str) -> None:
    environment = dict(server.environment)
    if behaviour == "dead":
        environment["WANDB_BASE_URL"] = f"http://127.0.0.1:{free_port()}"
    elif behaviour == "no account":
        del environment["WANDB_API_KEY"]
    else:
        server.behaviour = behaviour  # type: ignore[assignment]
    assert finish(start(tmp_path, TRACKED, environment))[0] == 0
    assert load_run(str(tmp_path / "store"), NAME).status == "complete"
    log = (tmp_path / "log").read_text()
    assert log.count("W&B: got") == 1
    assert "Traceback" not in log


@pytest.mark.parametrize("behaviour", ["answer", "stall"])
def test_a_signal_is_obeyed_in_time(tmp_path: Path, server: WandbServer, behaviour: str) -> None:
    """A run that ends is given 30 s for W&B to take the rest; one that is stopped leaves long before."""
    process = start(tmp_path, {**LONG, "run": {**LONG["run"], "grace_seconds": 25.0}}, server.environment)
    name = run_name(spec_from_data(LONG))
    wait_until(lambda: len(server.runs.get(name, ServedRun("")).history()) > 2, process)
    server.behaviour = behaviour  # type: ignore[assignment]
    process.terminate()
    assert finish(process)[0] == 75
    assert "leaving" not in (tmp_path / "log").read_text(), "the grace period ended first"


def test_offline_needs_no_account(tmp_path: Path) -> None:
    spec = {**TRACKED, "run": {**TRACKED["run"], "wandb": {"mode": "offline"}}}
    assert finish(start(tmp_path, spec, {}))[0] == 0
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{NAME}"))) == 1
    assert "W&B: got" not in (tmp_path / "log").read_text()


def test_a_sweep_by_two_agents_with_a_preempted_run(tmp_path: Path, server: WandbServer) -> None:
    """W&B's own sweep and agents: four runs; the long one is preempted, given out again, resumed under the same id."""
    slow = {f"training.{field}": value for field, value in SLOW["training"].items()}
    runs = [slow, *({"seeds.init": seed} for seed in (1, 2, 3))]
    (tmp_path / "sweep.json").write_text(json.dumps({"base": TRACKED, "list": runs}))
    sweep, store = load_sweep(tmp_path / "sweep.json"), tmp_path / "store"
    arguments = ["sweep.json", "--store", "store", "--engine", "wandb", "--devices", "cpu:2"]
    environment = {**server.environment, "XDG_STATE_HOME": str(tmp_path / "state")}
    process = start(tmp_path, TRACKED, environment, ["-m", "icl.sweep", *arguments])
    preempted: list[int] = []

    def one_is_preempted() -> bool:
        for run in list(server.runs.values()):
            if len(run.history()) > 20 and run.state == "running":
                name = run.told()["icl"]["run"]
                if name != sweep.members[0].name:
                    continue
                preempted.extend(attempt["pid"] for attempt in load_run(str(store), name).attempts())
                os.kill(preempted[0], signal.SIGTERM)
                return True
        return False

    assert wait_until(one_is_preempted, process)
    code, said = finish(process)
    assert (code, said) == (0, "4 complete\n"), (tmp_path / "log").read_text()
    assert len(server.sweeps) == 1
    assert len(server.runs) == 4
    attempts = {}
    for run in server.runs.values():
        member = next(member for member in sweep.members if member.name == run.told()["icl"]["run"])
        assert_whole(run, spec_to_data(member.spec), store)
        assert run.state == "finished"
        attempts[run.id] = load_run(str(store), member.name).attempts()
        assert {attempt["wandb"]["id"] for attempt in attempts[run.id]} == {run.id}
        assert {attempt["environment"]["ICL_WORKER"] for attempt in attempts[run.id]} <= {"cpu:0", "cpu:1"}
    (interrupted,) = [made for made in attempts.values() if len(made) == 2]
    assert interrupted[0]["status"] == "interrupted"
    assert interrupted[1]["from_step"] == interrupted[0]["to_step"] > 0
    assert (interrupted[0]["pid"], interrupted[1]["status"]) == (preempted[0], "complete")


def test_a_preempted_machine_saves_and_marks_every_run(tmp_path: Path, server: WandbServer) -> None:
    """SIGTERM to the sweep, as on a VM that is taken away: agents pass it on, and every run may be given out again."""
    (tmp_path / "sweep.json").write_text(json.dumps({"base": LONG, "grid": {"seeds.init": [0, 1]}}))
    arguments = ["sweep.json", "--store", "store", "--engine", "wandb", "--devices", "cpu:2"]
    environment = {**server.environment, "XDG_STATE_HOME": str(tmp_path / "state")}
    process = start(tmp_path, LONG, environment, ["-m", "icl.sweep", *arguments])
    wait_until(lambda: sum(len(run.history()) > 2 for run in list(server.runs.values())) == 2, process)
    process.terminate()
    assert finish(process)[0] == 75, (tmp_path / "log").read_text()
    assert [run.state for run in server.runs.values()] == ["preempted", "preempted"]
    for run in server.runs.values():
        (attempt,) = load_run(str(tmp_path / "store"), run.told()["icl"]["run"]).attempts()
        assert attempt["status"] == "interrupted"
        assert not Path(f"/proc/{attempt['pid']}").exists()
