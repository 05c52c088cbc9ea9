"""Tasks of a given covariance: their variances, and the posterior against its textbook formula."""

import math

import pytest
import torch

from icl.core.baselines import ridge_predictions
from icl.core.families.linear import LinearTask
from icl.core.families.power_law import PowerLawTask
from icl.core.spec import EvaluationSpec
from icl.core.tasks import sample_batch_on_device, sample_evaluation_batch, sample_task_pool
from icl.testing import tiny_spec

TASK = PowerLawTask(task_dim=4, num_examples=6, exponent=2.0, noise_variance=0.25)
VARIANCES = torch.tensor([1.0, 1 / 4, 1 / 9, 1 / 16], dtype=torch.float64)
VARIANCES /= VARIANCES.mean()


def test_weights_have_their_variances_on_the_host_and_on_a_device() -> None:
    spec = tiny_spec(task=TASK, evaluation=EvaluationSpec(batch_size=4000))
    ws = sample_evaluation_batch(spec, "true", None)["ws"].double()
    # Three standard errors of a variance from 4000 draws: 3 sqrt(2 / 4000) = 6.7 %.
    torch.testing.assert_close(ws.square().mean(0), VARIANCES, rtol=0.067, atol=0)
    there = sample_batch_on_device(
        tiny_spec(task=PowerLawTask(task_dim=4, num_examples=2000, exponent=16.0, noise_variance=0.0)),
        torch.empty(0),
        torch.Generator().manual_seed(1),
    )
    ratios = there["ys"] / there["xs"][..., :1]  # all of the variance is in the first weight, up to 2^-16
    assert (ratios[:, :, 0].quantile(0.75, dim=1) - ratios[:, :, 0].quantile(0.25, dim=1)).max() < 0.1


def test_an_exponent_of_zero_is_the_linear_family() -> None:
    flat = tiny_spec(task=PowerLawTask(task_dim=4, num_examples=6, exponent=0.0, num_tasks=7))
    linear = tiny_spec(task=LinearTask(task_dim=4, num_examples=6, num_tasks=7))
    ours, theirs = sample_task_pool(flat), sample_task_pool(linear)
    assert ours is not None
    assert theirs is not None
    assert ours.equal(theirs)


@pytest.mark.parametrize("noise", [0.01, 0.25])
def test_the_posterior_is_the_generalised_ridge(noise: float) -> None:
    task = PowerLawTask(task_dim=4, num_examples=6, exponent=2.0, noise_variance=noise)
    batch = sample_evaluation_batch(tiny_spec(task=task), "true", None)
    found = task.predictions(batch["xs"], batch["ys"], None)
    for b in range(5):
        x, y = batch["xs"][b].double(), batch["ys"][b].double()
        for k in range(6):
            precision = x[:k].T @ x[:k] / noise + VARIANCES.reciprocal().diag()
            expected = x[k] @ torch.linalg.solve(precision, x[:k].T @ y[:k] / noise)
            # Float64; the precision has condition numbers up to some 1e4.
            torch.testing.assert_close(found["posterior"][b, k], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["ridge"], ridge_predictions(batch["xs"], batch["ys"], noise))


def test_nothing_is_better_than_the_posterior() -> None:
    spec = tiny_spec(
        task=PowerLawTask(task_dim=4, num_examples=6, exponent=2.0, noise_variance=0.25, num_tasks=30),
        evaluation=EvaluationSpec(batch_size=2000),
    )
    batch = sample_evaluation_batch(spec, "true", None)
    found = spec.task.predictions(batch["xs"], batch["ys"], sample_task_pool(spec))
    best = (found["posterior"] - batch["ys"]).square().mean(1)
    for name in spec.task.baselines[1:]:
        excess = (found[name] - batch["ys"]).square().mean(1) - best
        # Paired over independent sequences: three standard errors of the mean difference.
        assert float(excess.mean()) > -3 * float(excess.std()) / math.sqrt(len(excess)), name
