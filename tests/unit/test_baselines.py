"""Ridge and dMMSE at the edges: no examples, no noise, one task, one dimension, a million tasks."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from icl.core import baselines
from icl.core.baselines import dmmse_predictions, ridge_predictions
from icl.core.families.linear import LinearTask
from icl.core.tasks import sample_task_pool
from icl.testing import tiny_spec


def data(batch: int = 5, examples: int = 6, dim: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, examples, dim, generator=generator), torch.randn(batch, examples, 1, generator=generator)


def direct_dmmse(xs: torch.Tensor, ys: torch.Tensor, pool: torch.Tensor, noise: float) -> torch.Tensor:
    """The textbook formula in float64, one context length at a time."""
    xs, ys, pool = xs.double(), ys.double(), pool.double()
    columns = []
    for k in range(xs.shape[1]):
        errors = (ys[:, :k] - xs[:, :k] @ pool.T).square().sum(1)
        weights = (-errors / (2 * noise)).softmax(-1)
        columns.append((xs[:, k] * (weights @ pool)).sum(-1))
    return torch.stack(columns, 1)[..., None]


def test_shapes_that_would_broadcast_are_refused() -> None:
    xs, ys = data()
    pool = torch.randn(7, 3)
    for wrong in (ys[..., 0], ys[:, :4], ys.expand(5, 6, 2), ys[:1]):
        with pytest.raises(ValueError, match=r"^ridge_predictions: got ys .* expected a tensor \(5, 6, 1\)"):
            ridge_predictions(xs, wrong, 0.125)
        with pytest.raises(ValueError, match=r"^dmmse_predictions: got ys .* expected a tensor \(5, 6, 1\)"):
            dmmse_predictions(xs, wrong, pool, 0.125)
    for wrong in (pool[0], pool[:, :2], pool[:0]):
        with pytest.raises(ValueError, match=r"^dmmse_predictions: got a pool .*expected \(M, D\)"):
            dmmse_predictions(xs, ys, wrong, 0.125)


@pytest.mark.parametrize("noise", [0.0, 1e-12, 1e-6, 0.125, 1e6])
@pytest.mark.parametrize(("examples", "dim"), [(6, 3), (3, 6), (1, 1), (4, 1), (1, 4)])
def test_ridge_is_the_regularised_inverse(noise: float, examples: int, dim: int) -> None:
    """Field fault 90: also where X'X is singular; sigma^2 -> 0 tends to the least-norm solution."""
    xs, ys = data(examples=examples, dim=dim)
    ours = ridge_predictions(xs, ys, noise)[..., 0]
    for b in range(len(xs)):
        for k in range(examples):
            design, targets, query = (
                xs[b, :k].double().numpy(),
                ys[b, :k, 0].double().numpy(),
                xs[b, k].double().numpy(),
            )
            augmented = np.vstack([design, np.sqrt(noise) * np.eye(dim)]) if noise > 1e-9 else design
            expected = query @ np.linalg.pinv(augmented) @ np.concatenate([targets, np.zeros(len(augmented) - k)])
            # float64 throughout; the condition number of these small random matrices stays below 1e4. For 1e-12 the
            # reference is the limit, from which ridge differs by noise / (smallest singular value)^2.
            assert float(ours[b, k]) == pytest.approx(float(expected), rel=1e-6, abs=1e-6)


def test_without_examples_ridge_is_zero_and_dmmse_the_mean_task() -> None:
    """Field fault 29."""
    xs, ys = data()
    pool = torch.randn(7, 3, generator=torch.Generator().manual_seed(3))
    assert not ridge_predictions(xs, ys, 0.125)[:, 0].any()
    expected = (xs[:, 0].double() * pool.double().mean(0)).sum(-1)
    torch.testing.assert_close(dmmse_predictions(xs, ys, pool, 0.125)[:, 0, 0], expected)
    torch.testing.assert_close(dmmse_predictions(xs, ys, pool, 0.0)[:, 0, 0], expected)


@pytest.mark.parametrize("num_tasks", [1, 2, 7, 5000])
@pytest.mark.parametrize("noise", [0.01, 0.125, 4.0])
def test_dmmse_is_the_posterior_mean(num_tasks: int, noise: float) -> None:
    """Earlier trainers, fault 7: any batch size, any number of tasks."""
    xs, ys = data()
    pool = torch.randn(num_tasks, 3, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(
        dmmse_predictions(xs, ys, pool, noise), direct_dmmse(xs, ys, pool, noise), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("noise", [0.0, 1e-12, 1e-6])
def test_without_noise_dmmse_is_the_nearest_task(noise: float) -> None:
    """Field fault 92: no under- or overflow, no NaN."""
    xs, _ = data(batch=4, examples=5)
    pool = torch.randn(2**12, 3, generator=torch.Generator().manual_seed(5))
    ys = (xs.double() @ pool[1234].double())[..., None]
    ours = dmmse_predictions(xs, ys, pool, noise)
    assert ours.isfinite().all()
    # From D examples on only the true task fits; the others are some 1e-2 away, against sigma of at most 1e-3.
    torch.testing.assert_close(ours[:, 4], ys[:, 4], rtol=1e-9, atol=1e-9)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    xs, ys = data(batch=37)
    pool = torch.randn(9000, 3, generator=torch.Generator().manual_seed(6))
    whole = dmmse_predictions(xs, ys, pool, 0.125), ridge_predictions(xs, ys, 0.125)
    monkeypatch.setattr(baselines, "BYTE_BUDGET", 1 << 16)
    parts = dmmse_predictions(xs, ys, pool, 0.125), ridge_predictions(xs, ys, 0.125)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_million_tasks() -> None:
    """M = 2^20, the largest of Raventos et al. 2023, streamed."""
    pool = sample_task_pool(tiny_spec(task=LinearTask(task_dim=2, num_examples=3, num_tasks=2**20)))
    assert pool is not None
    xs, ys = data(batch=2, examples=3, dim=2)
    torch.testing.assert_close(
        dmmse_predictions(xs, ys, pool, 0.25), direct_dmmse(xs, ys, pool, 0.25), rtol=1e-8, atol=1e-8
    )


def test_dmmse_of_many_tasks_tends_to_ridge() -> None:
    xs, ys = data(dim=2)
    pool = torch.randn(2**17, 2, generator=torch.Generator().manual_seed(7))
    # Monte Carlo over 131,072 tasks, of which only those near the posterior count: about 1 % error.
    gap = dmmse_predictions(xs, ys, pool, 1.0) - ridge_predictions(xs, ys, 1.0)
    assert gap.abs().max() < 0.05


BASELINES: dict[str, Callable[..., Tensor]] = {
    "ridge_predictions": ridge_predictions,
    "dmmse_predictions": lambda xs, ys, noise: dmmse_predictions(xs, ys, torch.ones(3, 2), noise),
}


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("noise", [-1.0, math.nan, math.inf, np.array([0.1, 0.2]), "0.1"])
def test_another_noise_is_refused(name: str, noise: object) -> None:
    with pytest.raises(ValueError, match=f"{name}: got noise_variance .*; expected a finite number >= 0"):
        BASELINES[name](torch.ones(4, 3, 2), torch.ones(4, 3, 1), noise)


@pytest.mark.parametrize("name", BASELINES)
def test_gradients_are_refused(name: str) -> None:
    """They would be NaN, from singular values that are equal."""
    xs = torch.ones(4, 3, 2, requires_grad=True)
    with pytest.raises(ValueError, match=r"require gradients.*xs\.detach"):
        BASELINES[name](xs, torch.ones(4, 3, 1), 0.1)
    assert BASELINES[name](xs.detach(), torch.ones(4, 3, 1), np.float64(0.1)).shape == (4, 3, 1)


@pytest.mark.parametrize("pool", [None, np.ones((3, 2))])
def test_what_is_no_pool_is_refused(pool: object) -> None:
    with pytest.raises(ValueError, match=r"got a pool .*call ridge_predictions"):
        dmmse_predictions(torch.ones(4, 3, 2), torch.ones(4, 3, 1), pool, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(4, 0, 2), (4, 3, 0)])
def test_ridge_of_nothing_predicts_zero(shape: tuple[int, int, int]) -> None:
    found = ridge_predictions(torch.ones(shape), torch.ones(*shape[:2], 1), 0.1)
    assert torch.equal(found, torch.zeros(*shape[:2], 1, dtype=torch.float64))
