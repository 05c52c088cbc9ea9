"""Exactness against the two public reference implementations (numbers made by running them)."""

import pytest
import torch

from icl.core.baselines import dmmse_predictions, ridge_predictions
from icl.core.metrics import TRAINING_LOSS
from icl.core.model import flatten_params, parameter_shapes, predict, unflatten_params
from icl.core.schedules import learning_rate
from icl.core.step import train_step
from tests.golden.references import NAMES, Reference, load_reference

# float32 has 24 bits (6e-8 relative); a prediction is a sum of some hundred rounded terms of size about 1.
PREDICTION_TOLERANCE = 1e-6
# The losses are rounded like predictions and drift apart over 20 updates; 4e-7 was seen from an independent program.
LOSS_TOLERANCE = 2e-6
# The references solve for ridge in float32: their error is about the condition number (some 100) times 6e-8.
RIDGE_TOLERANCE = 5e-5
# Both sides evaluate schedules in float32, the references by differences of the peak: 6e-8 of the peak, a few times.
LEARNING_RATE_TOLERANCE = 2e-7


@pytest.fixture(scope="module", params=NAMES)
def reference(request: pytest.FixtureRequest) -> Reference:
    return load_reference(request.param)


def test_parameters_have_our_names_and_shapes(reference: Reference) -> None:
    assert {name: tuple(value.shape) for name, value in reference.params.items()} == parameter_shapes(reference.spec)


def test_predictions(reference: Reference) -> None:
    ours = predict(reference.spec.model, reference.params, reference.tensors["xs"], reference.tensors["ys"])
    assert (ours - reference.tensors["preds"]).abs().max() < PREDICTION_TOLERANCE


def test_ridge(reference: Reference) -> None:
    noise = reference.spec.task.noise_variance
    ours = ridge_predictions(reference.tensors["xs"], reference.tensors["ys"], noise)
    assert (ours - reference.tensors["ridge"]).abs().max() < RIDGE_TOLERANCE


def test_dmmse(reference: Reference) -> None:
    noise = reference.spec.task.noise_variance
    ours = dmmse_predictions(reference.tensors["xs"], reference.tensors["ys"], reference.tensors["tasks"], noise)
    assert (ours - reference.tensors["dmmse"]).abs().max() < PREDICTION_TOLERANCE


def test_learning_rates(reference: Reference) -> None:
    theirs = reference.tensors["train/lrs"]
    training = reference.spec.training
    ours = learning_rate(training.schedule, training.total_steps, torch.arange(len(theirs)))
    atol = LEARNING_RATE_TOLERANCE * training.schedule.learning_rate
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=atol)


def test_twenty_updates(reference: Reference) -> None:
    vector = flatten_params(reference.spec, reference.params)
    state = {"params": vector, "mu": torch.zeros_like(vector), "nu": torch.zeros_like(vector), "step": torch.tensor(0)}
    losses = []
    for xs, ys in zip(reference.tensors["train/xs"], reference.tensors["train/ys"], strict=True):
        state, metrics = train_step(reference.spec, state, {"xs": xs, "ys": ys})
        losses.append(metrics[TRAINING_LOSS].double())
    torch.testing.assert_close(torch.stack(losses), reference.tensors["train/losses"], rtol=LOSS_TOLERANCE, atol=0)
    after = predict(
        reference.spec.model,
        unflatten_params(reference.spec, state["params"]),
        reference.tensors["xs"],
        reference.tensors["ys"],
    )
    # Adam divides by the root of the squared gradient: where a gradient is nearly 0, its sign is rounding.
    assert (after - reference.tensors["train/preds_after"]).abs().max() < 2e-5
