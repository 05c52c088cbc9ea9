"""The laws of the three protocols, for every family, architecture and optimiser in the tables."""

import math
from typing import Any

import pytest
import torch

from icl.core.architectures import ARCHITECTURES
from icl.core.backend import identical
from icl.core.estimate import count_parameters
from icl.core.families import FAMILIES
from icl.core.model import computation, flatten_params, init_params, parameter_shapes, predict, unflatten_params
from icl.core.optimizers import OPTIMIZERS
from icl.core.seeds import derive_generator
from icl.core.spec import Spec
from icl.core.step import init_state, state_leaves, train_step
from icl.core.tasks import sample_batch, sample_batch_on_device, sample_evaluation_batch, sample_task_pool
from icl.io.codec import spec_from_data, spec_to_data
from icl.loop import execute
from icl.predictor import Predictor
from icl.results import load_run
from icl.testing import tiny_spec, with_training

SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "embed_dim": 8}
TASK: dict[str, Any] = {"task_dim": 3, "num_examples": 4}
POOL: dict[str, Any] = {"num_tasks": 5}
SPECS: dict[str, Spec] = {
    **{f"task {name}": tiny_spec(task=family(**TASK, **POOL)) for name, family in FAMILIES.items()},
    **{f"task {name} inf": tiny_spec(task=family(**TASK)) for name, family in FAMILIES.items()},
    **{f"model {name}": tiny_spec(model=architecture(**SIZES)) for name, architecture in ARCHITECTURES.items()},
    **{f"optimizer {name}": with_training(tiny_spec(), optimizer=rule()) for name, rule in OPTIMIZERS.items()},
}


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> Spec:
    return SPECS[request.param]


def test_names_are_those_of_the_tables() -> None:
    assert [family(**TASK).family for family in FAMILIES.values()] == list(FAMILIES)
    assert [architecture().architecture for architecture in ARCHITECTURES.values()] == list(ARCHITECTURES)
    assert [rule().name for rule in OPTIMIZERS.values()] == list(OPTIMIZERS)


def test_a_spec_survives_its_bytes_and_a_run_trains(spec: Spec) -> None:
    assert spec_from_data(spec_to_data(spec)) == spec
    store = f"memory://laws-{id(spec)}"
    data = spec_to_data(spec)
    outcome = execute(spec_from_data({**data, "run": {**data["run"], "store": store}}))
    run = load_run(store, outcome.run)
    assert outcome.status == "complete"
    assert run.metrics().loc[20, [f"true/delta_{name}" for name in spec.task.baselines]].notna().all()
    xs, ys = (run.evaluation_batch("true")[key] for key in ("xs", "ys"))
    assert run.model(20).requires_grad_(False)(xs, ys).equal(predict(run.spec.model, run.params(20), xs, ys))


def test_a_state_has_its_leaves_in_order_and_members_train_as_if_alone(spec: Spec) -> None:
    state, pool = init_state(spec), sample_task_pool(spec)
    assert list(state) == list(state_leaves(spec))
    batches = [sample_batch(spec, step, pool) for step in range(2)]
    alone = [train_step(spec, state, batch)[0] for batch in batches]
    together, _ = train_step(
        spec,
        {key: torch.stack([leaf, leaf]) for key, leaf in state.items()},
        {key: torch.stack([batch[key] for batch in batches]) for key in batches[0]},
    )
    assert list(together) == list(state)
    for member, one in enumerate(alone):
        for key, leaf in one.items():
            # vmap picks other kernels: float32 rounding, which Adam's division may amplify.
            torch.testing.assert_close(together[key][member], leaf, rtol=1e-4, atol=1e-5)


def test_a_step_runs_on_the_device_of_its_inputs(spec: Spec) -> None:
    state = {key: leaf.to("meta") for key, leaf in init_state(spec).items()}
    batch = {key: leaf.to("meta") for key, leaf in sample_batch(spec, 0, sample_task_pool(spec)).items()}
    new, metrics = train_step(spec, state, batch)
    assert all(leaf.device.type == "meta" for leaf in (*new.values(), *metrics.values()))


def test_draws_are_a_function_of_the_generator_and_pools_are_nested(spec: Spec) -> None:
    task, pool = spec.task, sample_task_pool(spec)
    one, parts = derive_generator(3, "x"), derive_generator(3, "x")
    whole = task.draw_tasks(one, 5)
    assert whole.shape == (5, task.task_size)
    assert (whole[:2] == task.draw_tasks(parts, 2)).all()
    assert (whole[2:] == task.draw_tasks(parts, 3)).all()
    batch = sample_evaluation_batch(spec, "pretrain", pool)
    assert identical(batch, sample_evaluation_batch(spec, "pretrain", pool))
    shapes = {"xs": (16, 4, 3), "ys": (16, 4, 1), "ws": (16, task.task_size)}
    assert {key: tuple(leaf.shape) for key, leaf in batch.items()} == shapes
    assert all(leaf.dtype == torch.float32 for leaf in batch.values())
    there = sample_batch_on_device(spec, torch.empty(0) if pool is None else pool, torch.Generator().manual_seed(1))
    assert {key: tuple(leaf.shape) for key, leaf in there.items()} == {"xs": (8, 4, 3), "ys": (8, 4, 1)}


def test_baselines_read_only_what_comes_before(spec: Spec) -> None:
    task, pool = spec.task, sample_task_pool(spec)
    batch = sample_evaluation_batch(spec, "true", pool)
    base = task.predictions(batch["xs"], batch["ys"], pool)
    assert tuple(base) == task.baselines
    for k in range(task.num_examples):
        xs, ys = batch["xs"].clone(), batch["ys"].clone()
        xs[:, k + 1 :] += 100
        ys[:, k:] -= 100
        for name, changed in task.predictions(xs, ys, pool).items():
            assert changed.dtype == torch.float64
            # The linear algebra of a batch is not bit for bit that of another.
            torch.testing.assert_close(changed[:, : k + 1], base[name][:, : k + 1])


def test_predictions_are_causal_and_gradients_reach_every_parameter(spec: Spec) -> None:
    batch, params = sample_evaluation_batch(spec, "true", None), init_params(spec)
    xs, ys = batch["xs"], batch["ys"]
    base = predict(spec.model, params, xs, ys)
    for k in range(spec.task.num_examples):
        later_xs, later_ys = xs.clone(), ys.clone()
        later_xs[:, k + 1 :] += 100
        later_ys[:, k:] -= 100
        assert torch.equal(predict(spec.model, params, later_xs, later_ys)[:, : k + 1], base[:, : k + 1])
    vector = flatten_params(spec, params).requires_grad_()
    loss = predict(spec.model, unflatten_params(spec, vector), xs, ys).square().sum()
    (grads,) = torch.autograd.grad(loss, vector)
    assert all(bool(grad.any()) for grad in unflatten_params(spec, grads).values())


def test_parameters_are_counted_and_belong_to_parts(spec: Spec) -> None:
    shapes = parameter_shapes(spec)
    assert count_parameters(spec) == sum(map(math.prod, shapes.values()))
    assert {name: tuple(value.shape) for name, value in init_params(spec).items()} == shapes
    for name in Predictor(spec, init_params(spec)).state_dict():
        assert callable(computation(spec.model, name.rpartition(".")[0]))
