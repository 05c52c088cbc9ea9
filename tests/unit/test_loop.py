"""The loop: same bits whatever happens around it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from icl.backends.cpu import CPUBackend
from icl.core.architectures.raventos import Raventos
from icl.core.backend import identical
from icl.core.errors import NonFiniteLossError
from icl.core.families.linear import LinearTask
from icl.core.optimizers.adam import Adam
from icl.core.spec import ScheduleSpec, Spec, StepsSpec
from icl.io.codec import with_run
from icl.io.errors import CheckpointError
from icl.io.names import run_name
from icl.io.rundir import open_run
from icl.io.store import open_store
from icl.io.verify import verify_run
from icl.loop import execute
from icl.member import Outcome
from icl.results import Run, list_runs, load_run, train
from icl.testing import tiny_spec, with_training

SPEC = tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=5))


def saved(run: Run) -> dict[int, dict[str, torch.Tensor]]:
    return {step: run.params(step) for step in run.steps}


def same(one: Run, other: Run) -> bool:
    """Whether two runs have equal bits at every step and metric that both have, and share some."""
    ours, theirs = saved(one), saved(other)
    common = ours.keys() & theirs.keys()
    mine, yours = one.metrics(), other.metrics()
    rows, columns = mine.index.intersection(yours.index), mine.columns.intersection(yours.columns)
    left, right = mine.loc[rows, columns], yours.loc[rows, columns]
    both = left.notna() & right.notna()
    return bool(
        {0, one.spec.training.total_steps} <= common
        and all(identical(ours[step], theirs[step]) for step in common)
        and len(rows)
        and (left[both].fillna(0) == right[both].fillna(0)).all(axis=None)
    )


def stop_after(chunks: int) -> Callable[[], bool]:
    left = [chunks]

    def should_stop() -> bool:
        left[0] -= 1
        return left[0] <= 0

    return should_stop


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(SPEC, store=str(tmp_path_factory.mktemp("unbroken")))


def test_a_run_has_every_step_exactly_once(unbroken: Run) -> None:
    metrics = unbroken.metrics()
    assert list(metrics.index) == list(range(21))
    assert metrics["train/loss"].notna().sum() == 20
    assert list(metrics["pretrain/mse"].dropna().index) == [0, 10, 20]
    assert unbroken.steps == [0, 10, 20]
    assert unbroken.status == "complete"


def test_training_lowers_the_loss(store_url: str) -> None:
    spec = with_training(SPEC, total_steps=200, schedule=ScheduleSpec(name="constant", learning_rate=0.01))
    metrics = train(spec, store=store_url).metrics()["pretrain/mse"].dropna()
    assert metrics.iloc[-1] < 0.8 * metrics.iloc[0]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interruptions_do_not_change_a_bit(unbroken: Run, store_url: str, chunks: int) -> None:
    """Earlier trainers, fault 1; field faults 31, 34, 36, 46: resume again and again, from every place."""
    spec = with_run(SPEC, store=store_url)
    outcomes: list[Outcome] = []
    while not outcomes or outcomes[-1].status == "interrupted":
        outcomes.append(execute(spec, should_stop=stop_after(chunks)))
        assert len(outcomes) < 40
    assert len(outcomes) > 1
    resumed = load_run(store_url, outcomes[-1].run)
    assert same(resumed, unbroken)
    assert resumed.metrics().equals(unbroken.metrics())


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_at": StepsSpec(linear=21), "evaluate_at": StepsSpec(linear=21)},
        {"checkpoint_at": StepsSpec(also=(7,)), "evaluate_at": StepsSpec()},
        {"log_every": 1, "save_state_every": 1},
        {"max_chunk": 1},
        {"max_chunk": 64, "save_state_every": 1000, "log_every": 1000},
    ],
)
def test_cadences_do_not_change_a_bit(unbroken: Run, store_url: str, changes: dict[str, Any]) -> None:
    """Field fault 31: what is saved, evaluated or logged, and when, is not part of the experiment."""
    other = train(with_run(SPEC, **changes), store=store_url)
    assert other.name == unbroken.name
    assert same(other, unbroken)


def test_global_generators_and_settings_play_no_part(unbroken: Run, store_url: str) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        other = train(SPEC, store=store_url)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(other, unbroken)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.random() == random.Random(1).random()


def test_the_cadence_may_change_at_a_resume(unbroken: Run, store_url: str) -> None:
    spec = with_run(SPEC, store=store_url)
    execute(spec, should_stop=stop_after(2))
    changed = with_run(spec, evaluate_at=StepsSpec(linear=11), checkpoint_at=StepsSpec(linear=5), log_every=3)
    other = load_run(store_url, execute(changed).run)
    assert same(other, unbroken)
    assert list(other.metrics().index) == list(range(21))


def test_a_finished_run_is_left_alone(store_url: str) -> None:
    """Field fault 37."""
    spec = with_run(SPEC, store=store_url)
    assert execute(spec).status == "complete"
    assert execute(spec).status == "already_complete"
    assert execute(with_run(spec, log_every=5)).status == "already_complete"


@pytest.mark.parametrize("total", [1, 2, 3])
def test_the_shortest_runs(store_url: str, total: int) -> None:
    run = train(with_training(SPEC, total_steps=total), store=store_url)
    assert {0, total} <= set(run.steps)
    assert list(run.metrics().index) == list(range(total + 1))


@pytest.mark.parametrize(
    "spec",
    [
        tiny_spec(task=LinearTask(task_dim=1, num_examples=1, num_tasks=1)),
        tiny_spec(task=LinearTask(task_dim=3, num_examples=2, noise_variance=0.0)),
        tiny_spec(task=LinearTask(task_dim=2, num_examples=5, num_tasks=4, noise_variance=1e-12)),
        tiny_spec(model=Raventos(num_heads=2, embed_dim=8)),
        with_training(SPEC, sampling="device"),
        with_training(SPEC, optimizer=Adam(weight_decay=0.1, max_grad_norm=1.0)),
    ],
    ids=["smallest", "noiseless", "nearly-noiseless", "raventos", "device-sampling", "adamw-clipped"],
)
def test_every_kind_of_run_resumes(spec: Spec, store_url: str) -> None:
    whole = train(spec, store=f"{store_url}/whole")
    broken = with_run(spec, store=f"{store_url}/broken")
    execute(broken, should_stop=stop_after(3))
    assert same(load_run(f"{store_url}/broken", execute(broken).run), whole)


def test_a_loss_that_is_not_finite_stops_and_loses_nothing(store_url: str) -> None:
    spec = with_training(SPEC, schedule=ScheduleSpec(name="constant", learning_rate=1e30))
    with pytest.raises(NonFiniteLossError, match=r"at update \d+; expected a finite number.*learning_rate"):
        train(spec, store=store_url)
    (summary,) = list_runs(store_url)
    run = load_run(store_url, summary.name)
    assert run.status == "incomplete"
    assert all(value.isfinite().all() for step in run.steps for value in run.params(step).values())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("noise_variance", [1e38, 1e308])
def test_a_loss_that_is_not_finite_before_anything_was_learnt_blames_no_learning_rate(
    tmp_path: Path, noise_variance: float
) -> None:
    spec = attrs.evolve(SPEC, task=LinearTask(task_dim=3, num_examples=4, noise_variance=noise_variance))
    with pytest.raises(NonFiniteLossError, match=r"at update 1; expected .*noise_variance") as caught:
        train(spec, store=tmp_path)
    assert "learning_rate" not in str(caught.value)


@pytest.mark.parametrize("gone", ["spec.json", "checkpoints", "metrics"])
def test_a_run_is_not_complete_when_what_was_saved_went_away_meanwhile(store_url: str, gone: str) -> None:
    """As when a disk is unmounted: what is saved from then on is there, and what was before is not."""
    spec, store, name = with_run(SPEC, store=store_url), open_store(store_url), run_name(SPEC)
    execute(spec, should_stop=stop_after(3))
    path = f"{name}/{gone}" if gone == "spec.json" else f"{name}/{gone}/{store.list(f'{name}/{gone}')[0]}"
    with pytest.raises(CheckpointError, match=r"got no .* at the end; expected what was saved\. .* run again"):
        execute(spec, progress=lambda step, row: store.delete(path))
    assert "complete.json" not in store.list(name)
    if gone != "metrics":  # whose losses are not computed again
        assert execute(spec).status == "complete"
        assert list(verify_run(open_run(store, spec))) == []


class OtherBackend(CPUBackend):
    """A backend that says it is another machine."""

    def describe(self) -> dict[str, str]:
        return super().describe() | {"kernels": "another"}


def test_another_backend_is_refused_unless_asked_for(store_url: str) -> None:
    spec = with_run(SPEC, store=store_url)
    execute(spec, should_stop=stop_after(3))
    with pytest.raises(CheckpointError, match=r"kernels .* -> another.*--allow-backend-change"):
        execute(spec, backend=OtherBackend())
    outcome = execute(spec, backend=OtherBackend(), allow_backend_change=True)
    assert outcome.status == "complete"
    run = load_run(store_url, outcome.run)
    assert list(run.metrics().index) == list(range(21))


def test_progress_is_told_of_losses_and_evaluations(store_url: str) -> None:
    told: dict[int, set[str]] = {}
    train(SPEC, store=store_url, progress=lambda step, row: told.update({step: set(row)}))
    assert 7 in told
    assert "train/loss" in told[7]
    assert "pretrain/delta_dmmse" in told[10]
    assert attrs.asdict(SPEC.run)["log_every"] == 7
