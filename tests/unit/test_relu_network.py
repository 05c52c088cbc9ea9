"""Two-layer ReLU networks: their outputs and predictors against slow ones, and what gradient descent reaches."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from icl.core import baselines
from icl.core.families.relu_network import ReLUNetworkTask, descent_predictions
from icl.core.seeds import derive_generator
from icl.core.spec import EvaluationSpec
from icl.core.tasks import sample_batch_on_device, sample_evaluation_batch, sample_task_pool
from icl.testing import tiny_spec

TASK = ReLUNetworkTask(task_dim=3, num_examples=6, hidden_dim=5, num_tasks=70, noise_variance=0.25)


def output(w: np.ndarray, x: np.ndarray, hidden: int = 5) -> float:
    inner, outer = w[: hidden * len(x)].reshape(hidden, len(x)), w[hidden * len(x) :]
    return float(math.sqrt(2 / hidden) * outer @ np.maximum(inner @ x, 0))


def test_targets_are_outputs_of_the_network_on_the_host_and_on_a_device() -> None:
    spec = tiny_spec(task=ReLUNetworkTask(task_dim=3, num_examples=6, hidden_dim=5, num_tasks=1))
    pool = sample_task_pool(spec)
    assert pool is not None
    drawn = sample_evaluation_batch(spec, "pretrain", pool)
    there = sample_batch_on_device(spec, pool, torch.Generator().manual_seed(1))
    for batch in (drawn, there):
        expected = [[output(pool[0].double().numpy(), x.double().numpy()) for x in xs] for xs in batch["xs"]]
        # Sums of 15 products in float32.
        torch.testing.assert_close(batch["ys"][..., 0], torch.tensor(expected).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 8])
def test_a_target_has_variance_d(dim: int) -> None:
    spec = tiny_spec(task=ReLUNetworkTask(task_dim=dim, num_examples=1), evaluation=EvaluationSpec(batch_size=4000))
    squares = sample_evaluation_batch(spec, "true", None)["ys"].square()
    # Three standard errors of the mean.
    assert float(squares.mean()) == pytest.approx(dim, abs=3 * float(squares.std()) / math.sqrt(4000))


def test_dmmse_is_the_posterior_over_the_pool_and_nothing_is_better() -> None:
    spec = tiny_spec(task=TASK, evaluation=EvaluationSpec(batch_size=200))
    pool = sample_task_pool(spec)
    assert pool is not None
    batch = sample_evaluation_batch(spec, "pretrain", pool)
    xs, ys = batch["xs"], batch["ys"]
    found = TASK.predictions(xs, ys, pool)
    for b in range(3):
        outputs = np.array([[output(w.double().numpy(), x.double().numpy()) for w in pool] for x in xs[b]])
        for k in range(6):
            errors = ((ys[b, :k].double().numpy() - outputs[:k]) ** 2).sum(0)
            weights = np.exp(-(errors - errors.min()) / (2 * 0.25))
            assert float(found["dmmse"][b, k]) == pytest.approx(float(weights @ outputs[k] / weights.sum()), rel=1e-9)
    best = (found["dmmse"] - ys).square().mean(1)
    for name in TASK.baselines:
        excess = (found[name] - ys).square().mean(1) - best
        # Paired over independent sequences: three standard errors of the mean difference.
        assert float(excess.mean()) >= -3 * float(excess.std()) / math.sqrt(len(excess)), name


def by_torch(xs: Tensor, ys: Tensor, hidden: int) -> Tensor:
    """Gradient descent by torch.optim on one context, in float64: the prediction for the last x."""
    dim = xs.shape[1]
    drawn = derive_generator(0, "relu_network", "gradient_descent").standard_normal(hidden * dim, "float32")
    inner = torch.from_numpy(drawn).double().view(hidden, dim).requires_grad_()
    outer = torch.zeros(hidden, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([inner, outer], lr=5e-3)
    for _ in range(100):
        optimizer.zero_grad()
        outputs = math.sqrt(2 / hidden) * (xs[:-1] @ inner.T).relu() @ outer
        (outputs - ys[:-1]).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return (math.sqrt(2 / hidden) * (xs[-1] @ inner.T).relu() @ outer).detach()


def test_gradient_descent_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = sample_evaluation_batch(tiny_spec(task=TASK), "true", None)
    xs, ys = batch["xs"][:5], batch["ys"][:5]
    found = descent_predictions(xs, ys, 5)
    assert not found[:, 0].any()
    for b in range(2):
        for k in range(1, 6):
            expected = by_torch(xs[b, : k + 1].double(), ys[b, : k + 1, 0].double(), 5)
            # 100 updates in float32, where a unit may switch on one step later.
            torch.testing.assert_close(found[b, k, 0], expected, rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(baselines, "BYTE_BUDGET", 1)
    torch.testing.assert_close(descent_predictions(xs, ys, 5), found, rtol=1e-3, atol=1e-3)


def test_gradient_descent_beats_the_simple_baselines() -> None:
    """As in Garg et al. 2022."""
    task = ReLUNetworkTask(task_dim=4, num_examples=20, hidden_dim=40)
    spec = tiny_spec(task=task, evaluation=EvaluationSpec(batch_size=32))
    batch = sample_evaluation_batch(spec, "true", None)
    found = task.predictions(batch["xs"], batch["ys"], None)
    errors = {name: float((found[name] - batch["ys"])[:, 10:].square().mean()) for name in task.baselines}
    assert min(errors, key=errors.__getitem__) == "gradient_descent"
