"""Where runs stand, from the store alone."""

import socket
import threading
from pathlib import Path

import attrs
import pytest

from icl.core.architectures.timaeus import Timaeus
from icl.core.errors import NonFiniteLossError
from icl.core.families.linear import LinearTask
from icl.core.spec import EvaluationSpec, RunSpec, ScheduleSpec, Spec, TrainingSpec
from icl.io.codec import with_run
from icl.io.names import run_name
from icl.io.owner import owned, read_heartbeat
from icl.io.states import RunState, run_states
from icl.io.store import open_store
from icl.loop import execute

SPEC = Spec(
    task=LinearTask(task_dim=2, num_examples=2, num_tasks=3),
    model=Timaeus(num_layers=1, num_heads=1, embed_dim=4),
    training=TrainingSpec(total_steps=6, batch_size=4),
    evaluation=EvaluationSpec(batch_size=4),
    run=RunSpec(save_state_every=2, max_chunk=2, heartbeat_seconds=60),
)
DIVERGING = attrs.evolve(
    SPEC, training=attrs.evolve(SPEC.training, schedule=ScheduleSpec(name="constant", learning_rate=1e38))
)


def state_of(store_url: str, spec: Spec) -> RunState:
    waited: list[float] = []
    (state,) = run_states(open_store(store_url), [(run_name(spec), spec)], pause=waited.append)
    assert not waited
    return state


def test_a_runs_life(store_url: str) -> None:
    name, spec = run_name(SPEC), with_run(SPEC, store=store_url)
    assert state_of(store_url, SPEC) == RunState(name, "pending", 0, 6)
    asked = iter([False, True])
    assert execute(spec, should_stop=lambda: next(asked)).status == "interrupted"
    assert state_of(store_url, SPEC) == RunState(name, "stopped", 2, 6)
    with owned(open_store(store_url), name, every=60):
        here = state_of(store_url, SPEC)
    assert (here.status, here.step) == ("running", 2)
    assert socket.gethostname() in here.note
    execute(spec)
    assert state_of(store_url, SPEC) == RunState(name, "complete", 6, 6)


def test_why_a_run_has_failed_is_in_its_store(store_url: str) -> None:
    with pytest.raises(NonFiniteLossError):
        execute(with_run(DIVERGING, store=store_url))
    state = state_of(store_url, DIVERGING)
    assert (state.status, state.step) == ("failed", 0)
    assert state.note.startswith("NonFiniteLossError: training loss: got")


def test_an_attempt_that_was_cut_off_after_a_failure_is_not_one(tmp_path: Path) -> None:
    spec = with_run(SPEC, store=str(tmp_path))

    def broken(step: int, row: object) -> None:
        raise OSError("progress is broken")

    with pytest.raises(OSError, match="progress"):
        execute(spec, progress=broken)
    assert state_of(str(tmp_path), SPEC).status == "failed"
    execute(spec, should_stop=lambda: True)
    assert state_of(str(tmp_path), SPEC).status == "stopped"


def test_an_owner_elsewhere_is_looked_at_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat that goes on between two looks is a living process, whatever any clock says."""
    store, name = open_store(str(tmp_path)), run_name(SPEC)
    execute(with_run(SPEC, store=str(tmp_path)), should_stop=lambda: True)
    monkeypatch.setattr("icl.io.presence.look", lambda token: "unknown")
    beating, leave = threading.Event(), threading.Event()

    def beat() -> None:
        with owned(store, name, every=0.01):
            beating.set()
            leave.wait()

    thread = threading.Thread(target=beat)
    thread.start()
    beating.wait()
    try:

        def until_it_beats(seconds: float) -> None:
            before = read_heartbeat(store, name)
            while read_heartbeat(store, name).data == before.data:
                pass

        (alive,) = run_states(store, [(name, SPEC)], pause=until_it_beats)
        assert alive.status == "running"
    finally:
        leave.set()
        thread.join()

    def until_it_ends(seconds: float) -> None:
        """One that lets go between the two looks does not run either."""
        owner.__exit__(None, None, None)

    owner = owned(store, name, every=60)
    owner.__enter__()
    (ended,) = run_states(store, [(name, SPEC)], pause=until_it_ends)
    assert ended.status == "stopped"
    silent = b'{"machine": "another boot", "host": "gone", "pid": 1, "every": 60.0}'
    (tmp_path / name / "owner").mkdir(exist_ok=True)
    (tmp_path / name / "owner" / "000000000009.json").write_bytes(silent)
    waited: list[float] = []
    (dead,) = run_states(store, [(name, SPEC)], pause=waited.append)
    assert (dead.status, waited) == ("stopped", [120.0])
