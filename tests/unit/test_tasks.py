"""Streams, task pools and batches."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.seeds import derive_generator, derive_key, derive_seed
from icl.core.spec import EvaluationSpec, SeedsSpec, Spec
from icl.core.tasks import (
    EVALUATION_SETS,
    sample_batch,
    sample_batches,
    sample_evaluation_batch,
    sample_task_pool,
    sample_training_batch,
)
from icl.testing import global_generators, tiny_spec, with_training


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]


def with_tasks(num_tasks: int | None, **changes: Any) -> Spec:
    return tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=num_tasks, **changes))


def test_golden_bits() -> None:
    """A library upgrade cannot change the data unnoticed: these digests are part of every published result."""
    spec = with_tasks(5)
    pool = sample_task_pool(spec)
    assert pool is not None
    batch = sample_batch(spec, 7, pool)
    evaluation = sample_evaluation_batch(spec, "true", pool)
    assert {
        "pool": digest(pool),
        "xs": digest(batch["xs"]),
        "ys": digest(batch["ys"]),
        "evaluation": digest(evaluation["ys"]),
    } == GOLDEN


GOLDEN = {
    "pool": "8f94cb47f9efb923",
    "xs": "efee0d2180518f2d",
    "ys": "f9aede6a74307764",
    "evaluation": "a5d95851bd3492cb",
}


def test_paths_never_collide() -> None:
    """Field fault 17; earlier trainers, fault 4: seed s at step t + 1 is not seed s + 1 at step t."""
    paths: list[tuple[Any, ...]] = [
        ("train", 11),
        ("train1", 1),
        ("train", "11"),
        ("train", 1, 1),
        ("train", 1),
        ("train",),
    ]
    keys = [derive_key(root, *path) for root in (0, 1, 10) for path in paths]
    assert len(set(keys)) == len(keys)
    assert derive_seed(3, "x") < 2**63


def test_seeds_separate_the_uses_of_randomness() -> None:
    """Earlier trainers, fault 4: no two purposes share bits even under one root, and none shifts another."""
    spec = tiny_spec(
        seeds=SeedsSpec(init=5, tasks=5, sampling=5, evaluation=5),
        task=LinearTask(task_dim=3, num_examples=4, num_tasks=8),
    )
    pool = sample_task_pool(spec)
    drawn = [sample_batch(spec, step, pool)["xs"] for step in range(3)]
    drawn += [sample_evaluation_batch(spec, name, pool)["xs"][:8] for name in ("pretrain", "true")]
    assert len({digest(x) for x in drawn}) == 5
    wider = tiny_spec(seeds=spec.seeds, task=spec.task, evaluation=EvaluationSpec(batch_size=99))
    assert identical(sample_batch(wider, 1, pool), sample_batch(spec, 1, pool))


def test_pools_are_nested() -> None:
    """Task i depends on the seed and i only (Carroll et al. 2025)."""
    largest = sample_task_pool(with_tasks(3000))
    assert largest is not None
    for num_tasks in (1, 2, 1023, 1024, 1025, 2999):
        pool = sample_task_pool(with_tasks(num_tasks))
        assert pool is not None
        assert torch.equal(pool, largest[:num_tasks])
    assert sample_task_pool(with_tasks(None)) is None


def test_any_step_is_addressable_and_chunks_are_stacks() -> None:
    spec = with_tasks(6)
    pool = sample_task_pool(spec)
    stacked = sample_batches(spec, range(3, 7), pool)
    assert stacked["xs"].shape == (4, 8, 4, 3)
    assert stacked["ys"].shape == (4, 8, 4, 1)
    for index in range(4):
        assert identical({key: leaf[index] for key, leaf in stacked.items()}, sample_batch(spec, 3 + index, pool))


def test_sampling_touches_no_global_generator() -> None:
    """Earlier trainers, fault 9."""
    before = global_generators()
    sample_batch(with_tasks(4), 0, sample_task_pool(with_tasks(4)))
    sample_evaluation_batch(with_tasks(4), "pretrain", sample_task_pool(with_tasks(4)))
    assert global_generators() == before


def test_moments_are_those_of_the_task() -> None:
    spec = with_training(tiny_spec(task=LinearTask(task_dim=3, num_examples=4, noise_variance=0.5)), batch_size=20_000)
    batch = sample_batch(spec, 0, None)
    # 80,000 and 240,000 samples: four standard errors are below 0.02 for means and 0.07 for the variance of y.
    assert abs(batch["xs"].mean()) < 0.02
    assert abs(batch["xs"].var() - 1) < 0.02
    assert abs(batch["ys"].var() - 3.5) < 0.1


def test_without_noise_the_targets_are_linear() -> None:
    spec = with_tasks(1, noise_variance=0.0)
    pool = sample_task_pool(spec)
    assert pool is not None
    batch = sample_batch(spec, 0, pool)
    # Three products and two additions in float32.
    torch.testing.assert_close(batch["ys"][..., 0], batch["xs"] @ pool[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tasks", [None, 3])
def test_the_tasks_are_those_that_made_the_targets(num_tasks: int | None) -> None:
    spec = with_tasks(num_tasks, noise_variance=0.0)
    pool = sample_task_pool(spec)
    training = sample_training_batch(spec, 2, pool)
    assert list(sample_batch(spec, 2, pool)) == ["xs", "ys"]  # what training reads, and no more is uploaded
    for batch in (training, *(sample_evaluation_batch(spec, s, pool) for s in EVALUATION_SETS)):
        assert batch["ws"].shape == (len(batch["xs"]), 3)
        # Three products and two additions in float32.
        torch.testing.assert_close(batch["ys"], batch["xs"] @ batch["ws"][..., None], rtol=1e-6, atol=1e-6)
    drawn = {tuple(w) for w in training["ws"].tolist()}
    assert pool is None or drawn <= {tuple(w) for w in pool.tolist()}


def test_task_draws_reach_every_task_evenly_beyond_2_to_24() -> None:
    """Field fault 95: torch.multinomial stops at 2^24 categories; integers do not."""
    rng = derive_generator(2, "train", 0)
    num_tasks = 2**24 + 3
    drawn = rng.integers(num_tasks, size=200_000)
    counts = np.bincount(drawn * 16 // num_tasks, minlength=16)
    chi_square = float(((counts - 12_500) ** 2 / 12_500).sum())
    assert chi_square < 37.7  # the 0.1 % quantile at 15 degrees of freedom
    assert drawn.max() > 2**24 - 1000


def test_an_unknown_evaluation_set_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of pretrain, true"):
        sample_evaluation_batch(tiny_spec(), "test", None)
