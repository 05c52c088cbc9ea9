"""Runs trained together: each has the bits of the run alone, and what fails ends its own run."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icl.core.backend import identical
from icl.core.errors import NonFiniteLossError, SpecError
from icl.core.families.linear import LinearTask
from icl.core.spec import ScheduleSpec, SeedsSpec, Spec
from icl.io.codec import with_run
from icl.io.errors import RunOwnedError, StoreError
from icl.io.manifest import Manifest
from icl.io.names import run_name
from icl.io.owner import owned
from icl.io.rundir import RunDir
from icl.io.store import open_store
from icl.loop import execute, execute_members
from icl.member import Outcome
from icl.options import Options
from icl.results import Run, load_run
from icl.testing import StrictBackend, specs, tiny_spec, with_training
from tests.unit.test_loop import stop_after


def seeded(spec: Spec, seed: int) -> Spec:
    return attrs.evolve(spec, seeds=SeedsSpec(init=seed))


PAIR = [
    seeded(tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=5)), 1),
    seeded(with_training(tiny_spec(), total_steps=13), 2),
]
DIVERGING = with_training(tiny_spec(), schedule=ScheduleSpec(name="constant", learning_rate=1e30))


def require_as_alone(spec: Spec, store: str, alone: str) -> None:
    ours = load_run(store, run_name(spec))
    theirs = load_run(alone, execute(with_run(spec, store=alone)).run)
    require_equal(ours, theirs)


def require_equal(one: Run, other: Run) -> None:
    assert one.status == other.status == "complete"
    assert one.steps == other.steps
    assert all(identical(one.params(step), other.params(step)) for step in one.steps)
    assert one.metrics().equals(other.metrics())


@settings(max_examples=8)
@given(st.lists(specs(), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 5))
def test_each_has_the_bits_of_the_run_alone(drawn: list[Spec], chunks: int, stop: int) -> None:
    """Beside one that fails, one that is gone on with, and one that is complete; and through a stop of all of them."""
    root = f"memory://{uuid.uuid4().hex}"
    store = f"{root}/together"
    own = [seeded(spec, index) for index, spec in enumerate(drawn)]
    together = [with_run(each, store=store) for each in [*own, *PAIR, seeded(DIVERGING, 9)]]
    interrupted, complete = together[-3:-1]
    execute(interrupted, should_stop=stop_after(chunks))
    execute(complete)
    if stop:
        execute_members(together, Options(should_stop=stop_after(stop)), backend=StrictBackend())
    endings = execute_members(together, Options(), backend=StrictBackend())
    assert [type(ending) for ending in endings] == [*[Outcome] * (len(together) - 1), NonFiniteLossError]
    assert isinstance(endings[-2], Outcome)
    assert endings[-2].status == "already_complete"
    for spec in together[:-1]:
        require_as_alone(spec, store, f"{root}/alone")
    failed = Manifest(open_store(store), run_name(together[-1])).last_error()
    assert failed is not None
    assert failed.startswith("NonFiniteLossError")


def test_they_train_side_by_side(store_url: str) -> None:
    told: list[tuple[str, int]] = []
    together = [with_run(seeded(tiny_spec(), seed), store=store_url) for seed in (1, 2)]
    execute_members(together, Options(progress=lambda run, step, row: told.append((run, step))))
    names = [run_name(spec) for spec in together]
    assert [run for run, _ in told] == names * (len(told) // 2)
    assert [step for run, step in told if run == names[0]] == [step for run, step in told if run == names[1]]


def test_a_run_that_is_owned_elsewhere_ends_alone(store_url: str) -> None:
    together = [with_run(spec, store=store_url, heartbeat_seconds=0.05) for spec in PAIR]
    with owned(open_store(store_url), run_name(together[0]), every=0.05):
        first, second = execute_members(together, Options())
    assert isinstance(first, RunOwnedError)
    assert isinstance(second, Outcome)
    assert second.status == "complete"


def test_a_store_that_fails_one_run_does_not_fail_the_other(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together, real = [with_run(spec, store=store_url) for spec in PAIR], RunDir.save_state

    def save_state(self: RunDir, *arguments: "object") -> None:
        if self.name == run_name(together[0]):
            raise StoreError("broken")
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(RunDir, "save_state", save_state)
    first, second = execute_members(together, Options())
    assert isinstance(first, StoreError)
    assert isinstance(second, Outcome)
    monkeypatch.undo()
    execute_members(together, Options())
    for spec in together:
        require_as_alone(spec, store_url, f"{store_url}/alone")


KILLED = """
import os, signal, sys
from icl.io.codec import with_run
from icl.loop import execute_members
from icl.options import Options
from tests.unit.test_members import PAIR
def die(run, step, row):
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
execute_members([with_run(spec, store=sys.argv[1]) for spec in PAIR], Options(progress=die))
"""


@pytest.mark.parametrize("step", [4, 10, 13])
def test_two_that_are_killed_together_go_on_to_the_same_bits(tmp_path: Path, step: int) -> None:
    store = str(tmp_path / "together")
    assert subprocess.run([sys.executable, "-c", KILLED, store, str(step)]).returncode == -signal.SIGKILL
    endings = execute_members([with_run(spec, store=store) for spec in PAIR], Options())
    assert [isinstance(ending, Outcome) and ending.status for ending in endings] == ["complete"] * 2
    for spec in PAIR:
        require_as_alone(spec, store, str(tmp_path / "alone"))


def test_what_cannot_share_a_process_is_refused_before_anything_begins(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    spec = with_run(PAIR[0], store=store)
    with pytest.raises(SpecError, match="run: got several"):
        execute_members([spec, with_run(PAIR[1], store=store, log_every=3)], Options())
    with pytest.raises(SpecError, match="twice; expected it once"):
        execute_members([spec, spec], Options())
    with pytest.raises(SpecError, match="matmul_precision: got several"):
        execute_members([spec, with_training(spec, matmul_precision="high")], Options())
    assert not os.path.exists(store)
    assert execute_members([], Options()) == ()


def test_an_interrupt_from_the_keyboard_ends_all_of_them(store_url: str) -> None:
    together = [with_run(spec, store=store_url) for spec in PAIR]

    def interrupt(run: str, step: int, row: Mapping[str, float]) -> None:
        if step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_members(together, Options(progress=interrupt))
    assert all(isinstance(ending, Outcome) for ending in execute_members(together, Options()))
