"""Averaging, nearest neighbours, and the posterior over a pool of any functions, against slow ones in NumPy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from icl.core import baselines
from icl.core.baselines import (
    averaging_predictions,
    dmmse_predictions,
    nearest_neighbours_predictions,
    pool_predictions,
)
from icl.core.families.gaussian import SIMPLE_BASELINES, simple_predictions
from icl.core.families.linear import LinearTask
from icl.core.tasks import sample_evaluation_batch
from icl.testing import tiny_spec


def data(batch: int = 7, examples: int = 6, dim: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, examples, dim, generator=generator), torch.randn(batch, examples, 1, generator=generator)


def slow(xs: Tensor, ys: Tensor, predict: Callable[..., float]) -> Tensor:
    """`predict(X, y, x)` at every position of every sequence."""
    found = [
        [
            predict(x[:k].double().numpy(), y[:k, 0].double().numpy(), x[k].double().numpy()) if k else 0.0
            for k in range(len(x))
        ]
        for x, y in zip(xs, ys, strict=True)
    ]
    return torch.tensor(found, dtype=torch.float64)[..., None]


def nearest(design: np.ndarray, targets: np.ndarray, query: np.ndarray) -> float:
    places = np.argsort(((design - query) ** 2).sum(1))[:3]
    return float(targets[places].mean())


def averaged(design: np.ndarray, targets: np.ndarray, query: np.ndarray) -> float:
    return float(query @ (design * targets[:, None]).mean(0))


def least_squares(design: np.ndarray, targets: np.ndarray, query: np.ndarray) -> float:
    return float(query @ np.linalg.lstsq(design, targets, rcond=None)[0])


@pytest.mark.parametrize("shape", [(7, 6, 3), (2, 9, 2), (3, 2, 5), (4, 1, 1)])
def test_simple_baselines_are_what_their_names_say(shape: tuple[int, int, int]) -> None:
    xs, ys = data(*shape)
    found = simple_predictions(xs, ys)
    assert tuple(found) == SIMPLE_BASELINES
    for name, predict in zip(SIMPLE_BASELINES, (least_squares, averaged, nearest), strict=True):
        # Float64; least squares from k = D examples has condition numbers up to some 1e4.
        torch.testing.assert_close(found[name], slow(xs, ys, predict), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("predict", [averaging_predictions, nearest_neighbours_predictions])
def test_what_they_refuse_and_their_edges(predict: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    xs, ys = data()
    with pytest.raises(ValueError, match=rf"^{predict.__name__}: got ys .* expected a tensor \(7, 6, 1\)"):
        predict(xs, ys[..., 0])
    with pytest.raises(ValueError, match=r"require gradients"):
        predict(xs.clone().requires_grad_(), ys)
    assert predict(xs[:0], ys[:0]).shape == (0, 6, 1)
    assert predict(xs[:, :0], ys[:, :0]).shape == (7, 0, 1)
    whole = predict(xs, ys)
    monkeypatch.setattr(baselines, "BYTE_BUDGET", 1)
    torch.testing.assert_close(predict(xs, ys), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise", [0.0, 1e-12, 0.125, 4.0])
@pytest.mark.parametrize("num_tasks", [1, 64, 150])
def test_the_posterior_over_a_pool_of_linear_functions_is_dmmse(num_tasks: int, noise: float) -> None:
    xs, ys = data(batch=90)
    pool = torch.randn(num_tasks, 3, generator=torch.Generator().manual_seed(2))
    found = pool_predictions(xs, ys, pool, noise, lambda x, tasks: x @ tasks.T, 3000)
    torch.testing.assert_close(found, dmmse_predictions(xs, ys, pool, noise), rtol=1e-8, atol=1e-8)


def test_ridge_is_not_worse_than_the_simple_baselines() -> None:
    task = LinearTask(task_dim=4, num_examples=8)
    batch = sample_evaluation_batch(tiny_spec(task=task), "true", None)
    errors = {
        name: float((predictions - batch["ys"]).square().mean())
        for name, predictions in (
            *task.predictions(batch["xs"], batch["ys"], None).items(),
            *simple_predictions(batch["xs"], batch["ys"]).items(),
        )
    }
    assert min(errors, key=errors.__getitem__) == "ridge"
