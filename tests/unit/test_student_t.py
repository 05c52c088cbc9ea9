"""Student's t label noise: its distribution, and the posterior over a pool against a slow one in NumPy."""

import hashlib
import math

import numpy as np
import pytest
import torch

from icl.core import baselines
from icl.core.backend import Tree
from icl.core.baselines import dmmse_predictions, ridge_predictions
from icl.core.errors import SpecError
from icl.core.families.student_t import StudentTTask, student_t_dmmse_predictions
from icl.core.seeds import derive_generator
from icl.core.spec import EvaluationSpec
from icl.core.tasks import sample_batch_on_device, sample_evaluation_batch, sample_task_pool
from icl.testing import tiny_spec, with_training


def evaluation(task: StudentTTask, evaluation_set: str, batch_size: int) -> tuple[Tree, torch.Tensor]:
    """A batch and the pool."""
    spec = tiny_spec(task=task, evaluation=EvaluationSpec(batch_size=batch_size))
    pool = sample_task_pool(spec)
    assert pool is not None
    return sample_evaluation_batch(spec, evaluation_set, pool), pool


def slow_dmmse(xs: np.ndarray, ys: np.ndarray, pool: np.ndarray, nu: float, variance: float) -> np.ndarray:
    """By the density of t as textbooks have it, one sequence at a time."""
    scale = math.sqrt(variance * (nu - 2) / nu)
    found = []
    for k in range(len(xs)):
        residuals = (ys[:k, None] - xs[:k] @ pool.T) / scale
        weights = ((1 + residuals**2 / nu) ** (-(nu + 1) / 2)).prod(0)
        found.append(weights @ (pool @ xs[k]) / weights.sum())
    return np.array(found)


def distribution(values: np.ndarray, nu: float) -> np.ndarray:
    """The distribution function of t in closed form."""
    if nu == 3:
        return 0.5 + (values / math.sqrt(3) / (1 + values**2 / 3) + np.arctan(values / math.sqrt(3))) / math.pi
    if nu == 4:
        inner = 1 + values**2 / 4
        return 0.5 + 0.375 * values / np.sqrt(inner) * (1 - values**2 / inner / 12)
    return np.array([(1 + math.erf(value / math.sqrt(2))) / 2 for value in values])  # of N(0, 1), to which it tends


@pytest.mark.parametrize("nu", [3.0, 4.0, 1e6])
def test_the_noise_is_students_t_of_the_given_variance_on_the_host_and_on_a_device(nu: float) -> None:
    task = StudentTTask(task_dim=2, num_examples=100, num_tasks=1, degrees_of_freedom=nu, noise_variance=0.25)
    xs, noise = task.draw_inputs(derive_generator(5, "x"), 200)
    nothing = np.zeros((200, 2), np.float32)
    host = task.targets(xs, noise, nothing)
    spec = with_training(tiny_spec(task=task), batch_size=200)
    device = sample_batch_on_device(spec, torch.zeros(1, 2), torch.Generator().manual_seed(1))["ys"].numpy()
    for ys in (host, device):
        assert ys.dtype == np.float32
        values = np.sort(ys.ravel().astype(float)) / math.sqrt(0.25 * (nu - 2) / nu)
        ranks = np.arange(len(values)) / len(values)
        # Kolmogorov: the distance of 20000 draws is above 1.95 / sqrt(20000) = 0.0138 once in a thousand times.
        assert np.abs(distribution(values, nu) - ranks).max() < 0.0138


def test_golden_bits() -> None:
    """As those of `test_tasks.py`: another processor or library draws the same noise."""
    noise = StudentTTask(task_dim=4, num_examples=8).draw_inputs(derive_generator(5, "x"), 1000)[1]
    assert noise.dtype == np.float32
    assert hashlib.sha256(noise.tobytes()).hexdigest()[:16] == "9e910442d1ec779e"


def test_without_noise_there_is_none_and_the_true_task_is_found() -> None:
    task = StudentTTask(task_dim=3, num_examples=5, num_tasks=7, noise_variance=0.0)
    batch, pool = evaluation(task, "pretrain", 8)
    found = task.predictions(batch["xs"], batch["ys"], pool)["dmmse"]
    # From the second example on; targets are rounded to float32.
    torch.testing.assert_close(found[:, 1:], batch["ys"][:, 1:].double(), rtol=1e-4, atol=1e-4)


def test_a_variance_that_is_not_finite_is_refused() -> None:
    with pytest.raises(SpecError, match=r"degrees_of_freedom: got 2\.0; expected a finite number > 2 and <= 1e\+06"):
        StudentTTask(task_dim=3, num_examples=4, degrees_of_freedom=2)


@pytest.mark.parametrize("nu", [2.1, 3.0, 30.0])
def test_dmmse_is_the_posterior_mean_by_the_density_of_t(nu: float, monkeypatch: pytest.MonkeyPatch) -> None:
    task = StudentTTask(task_dim=3, num_examples=6, num_tasks=5000, degrees_of_freedom=nu, noise_variance=0.25)
    batch, pool = evaluation(task, "true", 5)  # of more tasks than are read at once
    xs, ys = batch["xs"], batch["ys"]
    found = task.predictions(xs, ys, pool)
    for b in range(5):
        expected = slow_dmmse(xs[b].double().numpy(), ys[b, :, 0].double().numpy(), pool.double().numpy(), nu, 0.25)
        # Float64, sums of 5000.
        np.testing.assert_allclose(found["dmmse"][b, :, 0].numpy(), expected, rtol=1e-9, atol=1e-9)
    assert found["ridge"].equal(ridge_predictions(xs, ys, 0.25))
    monkeypatch.setattr(baselines, "BYTE_BUDGET", 1)
    torch.testing.assert_close(task.predictions(xs, ys, pool)["dmmse"], found["dmmse"], rtol=1e-9, atol=1e-9)


def test_many_degrees_of_freedom_are_gaussian() -> None:
    task = StudentTTask(task_dim=3, num_examples=6, num_tasks=20, degrees_of_freedom=1e6)
    batch, pool = evaluation(task, "pretrain", 50)
    found = task.predictions(batch["xs"], batch["ys"], pool)["dmmse"]
    # The log-likelihood of a residual of z deviations differs by about z^4 / (4 nu).
    torch.testing.assert_close(found, dmmse_predictions(batch["xs"], batch["ys"], pool, 0.125), rtol=1e-2, atol=1e-3)


def test_outliers_of_any_size_leave_predictions_finite() -> None:
    xs, pool = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)), torch.eye(3)
    ys = torch.tensor([[1e18, -1e18, 1e18, 0.0], [0.0, 1e18, 0.0, 0.0]])[..., None]
    assert student_t_dmmse_predictions(xs, ys, pool, 3.0, 0.125).isfinite().all()


def test_on_tasks_of_the_pool_nothing_is_better_than_dmmse() -> None:
    task = StudentTTask(task_dim=4, num_examples=8, num_tasks=50, degrees_of_freedom=2.5, noise_variance=1.0)
    batch, pool = evaluation(task, "pretrain", 2000)
    xs, ys = batch["xs"], batch["ys"]
    found = task.predictions(xs, ys, pool)
    others = {name: found[name] for name in task.baselines if name != "dmmse"}
    others["gaussian"] = dmmse_predictions(xs, ys, pool, 1.0)
    # Errors against w.x: the noise itself, of which squares have no variance, is left out.
    wanted = (xs * batch["ws"][:, None]).sum(-1, keepdim=True)
    best = (found["dmmse"] - wanted).square().mean(1)
    for name, prediction in others.items():
        excess = (prediction - wanted).square().mean(1) - best
        # Paired over independent sequences: three standard errors of the mean difference.
        error = 3 * float(excess.std()) / math.sqrt(len(excess))
        assert float(excess.mean()) > (error if name in ("ridge", "gaussian") else -error), name
