"""A store that version 0.1.0 wrote: it opens, verifies, goes on from where it was left, and names the same runs."""

import shutil
from pathlib import Path

import pytest
import torch

from icl.io.codec import with_run
from icl.io.names import run_name
from icl.io.rundir import read_run
from icl.io.store import open_store
from icl.io.verify import verify_run
from icl.loop import execute
from icl.results import load_run, train

STORE = Path(__file__).parents[1] / "data" / "store-0.1.0"
COMPLETE, INTERRUPTED = "L2H2-M5-s0-abdb0e81523b0380", "L1H2-Minf-s0-d3d5fc717490f256"
# Another kind of processor rounds otherwise. Adam moves a parameter by the learning rate (0.003) times a ratio that has
# the relative error of its gradient: 1e-4 where a sum of a few hundred float32 terms cancels. Twenty such updates: 6e-6.
ROUNDING = 1e-5


@pytest.fixture
def store(tmp_path: Path) -> str:
    copy = tmp_path / "store"
    shutil.copytree(STORE, copy)
    return str(copy)


def test_it_opens(store: str) -> None:
    run = load_run(store, COMPLETE)
    assert (run.name, run.status, run.steps) == (COMPLETE, "complete", [0, 10, 20])
    assert list(run.metrics().index) == list(range(21))
    assert run_name(load_run(store, INTERRUPTED).spec) == INTERRUPTED


def test_metrics_that_came_later_are_there_for_every_step(store: str) -> None:
    """Version 0.1.0 wrote no delta_dmmse where M is infinite; it is there, also where a run goes on from its files."""
    for _ in range(2):
        table = load_run(store, INTERRUPTED).metrics()
        ridge = [name for name in table.columns if "/delta_ridge" in name]
        assert len(ridge) == 2 * (1 + load_run(store, INTERRUPTED).spec.task.num_examples)
        for name in ridge:
            assert table[name.replace("ridge", "dmmse")].equals(table[name].rename(name.replace("ridge", "dmmse")))
        execute(with_run(load_run(store, INTERRUPTED).spec, store=store), allow_backend_change=True)


@pytest.mark.parametrize("name", [COMPLETE, INTERRUPTED])
def test_it_is_intact(store: str, name: str) -> None:
    assert list(verify_run(read_run(open_store(store), name)[0])) == []


@pytest.mark.parametrize("name", [COMPLETE, INTERRUPTED])
def test_training_goes_on_and_ends_as_now(store: str, tmp_path: Path, name: str) -> None:
    spec = load_run(store, name).spec
    outcome = execute(with_run(spec, store=store), allow_backend_change=True)
    assert outcome.status == ("already_complete" if name == COMPLETE else "complete")
    then, now = load_run(store, name), train(spec, store=str(tmp_path / "anew"))
    assert then.steps == now.steps == [0, 10, 20]
    for step in then.steps:
        for key, value in now.params(step).items():
            torch.testing.assert_close(then.params(step)[key], value, rtol=ROUNDING, atol=ROUNDING)
    assert list(verify_run(read_run(open_store(store), name)[0])) == []
