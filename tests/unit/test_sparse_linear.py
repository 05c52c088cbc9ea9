"""Sparse linear regression: its tasks, and its predictors against slow ones in NumPy."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from icl.core import baselines
from icl.core.errors import SpecError
from icl.core.estimate import check_fits, estimate
from icl.core.families import sparse_linear
from icl.core.families.sparse_linear import SparseLinearTask, lasso_predictions, posterior_predictions
from icl.core.spec import EvaluationSpec
from icl.core.tasks import sample_batch_on_device, sample_evaluation_batch, sample_task_pool
from icl.testing import tiny_spec


def data(task: SparseLinearTask, batch: int) -> tuple[Tensor, Tensor]:
    spec = tiny_spec(task=task)
    drawn = sample_evaluation_batch(spec, "true", None)
    return drawn["xs"][:batch], drawn["ys"][:batch]


def slow_posterior(design: np.ndarray, targets: np.ndarray, query: np.ndarray, size: int, noise: float) -> float:
    """Over all supports, each by the density of all targets at once."""
    logs, means = [], []
    for support in combinations(range(len(query)), size):
        own = design[:, support]
        covariance = own @ own.T + noise * np.eye(len(targets))
        solved = np.linalg.solve(covariance, targets)
        logs.append(-0.5 * (np.linalg.slogdet(covariance)[1] + targets @ solved))
        means.append(query[list(support)] @ own.T @ solved)
    weights = np.exp(np.array(logs) - max(logs))
    return float(weights @ np.array(means) / weights.sum())


def slow_lasso(design: np.ndarray, targets: np.ndarray, penalty: float) -> np.ndarray:
    """Proximal gradient descent, to the end."""
    count = len(targets)
    ws, step = np.zeros(design.shape[1]), count / np.linalg.norm(design, 2) ** 2
    for _ in range(20000):
        ws = ws - step * design.T @ (design @ ws - targets) / count
        ws = np.sign(ws) * np.maximum(np.abs(ws) - step * penalty, 0)
    return ws


def test_tasks_are_sparse_and_all_places_are_taken_equally() -> None:
    task = SparseLinearTask(task_dim=5, num_examples=4, num_nonzero=2, num_tasks=5000)
    spec = tiny_spec(task=task)
    pool = sample_task_pool(spec)
    assert pool is not None
    assert ((pool != 0).sum(1) == 2).all()
    # 5000 draws of a share of 0.4 and of a variance of 1: three standard errors are 0.021 and 0.042.
    torch.testing.assert_close((pool != 0).double().mean(0), torch.full((5,), 0.4).double(), rtol=0, atol=0.021)
    assert float(pool[pool != 0].square().mean()) == pytest.approx(1, abs=0.06)
    infinite = tiny_spec(task=SparseLinearTask(task_dim=5, num_examples=9, num_nonzero=1))
    there = sample_batch_on_device(infinite, torch.empty(0), torch.Generator().manual_seed(1))
    ratios = there["ys"] / there["xs"]  # constant along the one place that counts
    assert (ratios.std(1).amin(1) < 1e-4).all()


def test_more_weights_than_there_are_is_refused() -> None:
    with pytest.raises(SpecError, match="num_nonzero: got 4; expected at most task_dim=3"):
        SparseLinearTask(task_dim=3, num_examples=4, num_nonzero=4)


def test_a_size_that_another_field_forbids_is_not_proposed() -> None:
    spec = tiny_spec(task=SparseLinearTask(task_dim=3, num_examples=4, num_tasks=10**6))
    with pytest.raises(SpecError, match=r"Lower task\.num_tasks \(now 1000000\)\.$"):
        check_fits(spec, estimate(spec).memory() - 10**6)


@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.125, 2.0])
def test_the_posterior_is_that_of_all_supports(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    task = SparseLinearTask(task_dim=5, num_examples=7, num_nonzero=2, noise_variance=noise)
    xs, ys = data(task, 6)
    found = posterior_predictions(xs, ys, 2, noise)
    for b in range(6):
        x, y = xs[b].double().numpy(), ys[b, :, 0].double().numpy()
        for k in range(7):
            if noise == 0 and k > 2:  # the limit: the true support alone fits, and predicts y
                expected, error = float(y[k]), 1e-4
            else:
                # Where supports still fit exactly the limit is that of a small noise; float64 keeps it to 1e-6.
                expected, error = slow_posterior(x[:k], y[:k], x[k], 2, max(noise, 1e-9)), 1e-5
            assert float(found[b, k]) == pytest.approx(expected, rel=error, abs=error)
    monkeypatch.setattr(baselines, "BYTE_BUDGET", 1)
    torch.testing.assert_close(posterior_predictions(xs, ys, 2, noise), found, rtol=1e-9, atol=1e-9)


def test_the_posterior_with_all_weights_is_ridge() -> None:
    xs, ys = data(SparseLinearTask(task_dim=3, num_examples=6, noise_variance=0.5), 8)
    ridge = baselines.ridge_predictions(xs, ys, 0.5)
    torch.testing.assert_close(posterior_predictions(xs, ys, 3, 0.5), ridge, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("noise", [0.0, 0.125])
def test_the_lasso_tends_to_the_least_of_its_objective(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_linear, "LASSO_SWEEPS", 3000)  # examples that are nearly parallel take more than 100
    xs, ys = data(SparseLinearTask(task_dim=4, num_examples=8, num_nonzero=1, noise_variance=noise), 4)
    found = lasso_predictions(xs, ys, noise)
    assert not found[:, 0].any()
    for b in range(4):
        x, y = xs[b].double().numpy(), ys[b, :, 0].double().numpy()
        for k in range(1, 8):
            penalty = max(0.01, math.sqrt(2 * noise * math.log(4) / k))
            # Both are iterations that stop a little before the end.
            assert float(found[b, k]) == pytest.approx(float(x[k] @ slow_lasso(x[:k], y[:k], penalty)), abs=1e-3)


@pytest.mark.parametrize("noise", [0.0, 0.25])
def test_nothing_is_better_than_the_posterior(noise: float) -> None:
    task = SparseLinearTask(task_dim=6, num_examples=8, num_nonzero=2, noise_variance=noise, num_tasks=50)
    spec = tiny_spec(task=task, evaluation=EvaluationSpec(batch_size=1000))
    batch = sample_evaluation_batch(spec, "true", None)
    xs, ys = batch["xs"], batch["ys"]
    found = task.predictions(xs, ys, sample_task_pool(spec))
    best = (found["posterior"] - ys).square().mean(1)
    for name in task.baselines[1:]:
        excess = (found[name] - ys).square().mean(1) - best
        # Paired over independent sequences: three standard errors of the mean difference.
        assert float(excess.mean()) > -3 * float(excess.std()) / math.sqrt(len(excess)), name


def test_where_the_supports_are_too_many_the_lasso_is_left() -> None:
    few, many = (SparseLinearTask(task_dim=20, num_examples=4, num_nonzero=s) for s in (3, 6))
    assert few.baselines[:2] == ("posterior", "lasso")
    assert few.equal_baselines == {"dmmse": "posterior"}
    assert many.baselines[0] == "lasso"
    assert not many.equal_baselines
    huge = 2**31 - 1
    for s in (1, huge // 2, huge):
        assert "posterior" not in SparseLinearTask(task_dim=huge, num_examples=4, num_nonzero=s).baselines
