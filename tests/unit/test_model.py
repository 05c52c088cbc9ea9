"""Both architectures: counts, causality, and the sizes at the edges. Exactness is in tests/golden."""

import math

import pytest
import torch

from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.model import flatten_params, init_params, parameter_shapes, predict, unflatten_params
from icl.core.spec import SeedsSpec, Spec
from icl.testing import tiny_spec

MODELS = {
    "timaeus": Timaeus(num_heads=2, embed_dim=8),
    "timaeus-bare": Timaeus(num_heads=2, embed_dim=8, num_layers=1, layer_norm=False, attention_output=False),
    "raventos": Raventos(num_heads=2, embed_dim=8),
}


@pytest.fixture(params=MODELS)
def spec(request: pytest.FixtureRequest) -> Spec:
    return tiny_spec(model=MODELS[request.param])


def sequences(spec: Spec, batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, spec.task.num_examples, spec.task.task_dim)
    return torch.randn(shape, generator=generator), torch.randn((*shape[:2], 1), generator=generator)


@pytest.mark.parametrize(
    ("task", "model", "count"),
    [
        ((4, 8), Timaeus(), 51_717),
        ((4, 16), Timaeus(), 52_741),
        ((8, 16), Timaeus(embed_dim=512, attention_output=False), 2_654_217),
        ((8, 16), Timaeus(num_layers=8, num_heads=2, embed_dim=128, attention_output=False), 668_169),
        ((8, 16), Timaeus(num_layers=8, num_heads=2, embed_dim=128), 799_241),
    ],
)
def test_parameter_counts_of_the_papers(task: tuple[int, int], model: Timaeus, count: int) -> None:
    spec = tiny_spec(task=LinearTask(task_dim=task[0], num_examples=task[1]), model=model)
    assert sum(math.prod(shape) for shape in parameter_shapes(spec).values()) == count


def test_causality_is_exact(spec: Spec) -> None:
    """Field fault 94; earlier trainers, fault 8: what comes later changes no earlier prediction by a bit."""
    params, (xs, ys) = init_params(spec), sequences(spec)
    base = predict(spec.model, params, xs, ys)
    for k in range(spec.task.num_examples):
        later_xs, later_ys = xs.clone(), ys.clone()
        later_xs[:, k + 1 :] += 100
        later_ys[:, k:] -= 100
        changed = predict(spec.model, params, later_xs, later_ys)
        assert torch.equal(changed[:, : k + 1], base[:, : k + 1])
        if k + 1 < spec.task.num_examples:
            assert not torch.equal(changed[:, k + 1 :], base[:, k + 1 :])


def test_permuting_the_batch_permutes_the_output(spec: Spec) -> None:
    params, (xs, ys) = init_params(spec), sequences(spec)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    base = predict(spec.model, params, xs, ys)
    assert torch.equal(predict(spec.model, params, xs[order], ys[order]), base[order])


def test_shorter_sequences_are_prefixes(spec: Spec) -> None:
    params, (xs, ys) = init_params(spec), sequences(spec)
    base = predict(spec.model, params, xs, ys)
    for k in range(1, spec.task.num_examples):
        # Other matrix shapes may add in another order: float32 rounding of values about 1.
        torch.testing.assert_close(predict(spec.model, params, xs[:, :k], ys[:, :k]), base[:, :k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_smallest_sizes(name: str, dim: int, examples: int) -> None:
    spec = tiny_spec(task=LinearTask(task_dim=dim, num_examples=examples), model=MODELS[name])
    xs, ys = sequences(spec, batch=1)
    ys_pred = predict(spec.model, init_params(spec), xs, ys)
    assert ys_pred.shape == (1, examples, 1)
    assert ys_pred.isfinite().all()


def test_gradients_are_finite_and_reach_every_parameter(spec: Spec) -> None:
    xs, ys = sequences(spec)
    vector = flatten_params(spec, init_params(spec)).requires_grad_()
    params = unflatten_params(spec, vector)
    (grads,) = torch.autograd.grad(predict(spec.model, params, xs, ys).square().sum(), vector)
    assert grads.isfinite().all()
    reached = {name: bool(grad.any()) for name, grad in unflatten_params(spec, grads).items()}
    assert all(reached.values()), reached


def test_flat_vectors_round_trip(spec: Spec) -> None:
    params = init_params(spec)
    assert identical(unflatten_params(spec, flatten_params(spec, params)), params)


def test_initialisation_is_a_function_of_seed_and_name() -> None:
    """Field fault 16: no shared generator, so neither order nor other parameters matter."""
    spec = tiny_spec(model=MODELS["timaeus"])
    deeper = tiny_spec(model=Timaeus(num_heads=2, embed_dim=8, num_layers=3))
    shallow, deep = init_params(spec), init_params(deeper)
    assert identical(shallow, {name: deep[name] for name in shallow})
    other = init_params(tiny_spec(model=MODELS["timaeus"], seeds=SeedsSpec(init=1)))
    assert all(not torch.equal(other[n], shallow[n]) for n in shallow if "layer_norm" not in n)


def test_initial_scales() -> None:
    wide = tiny_spec(model=Raventos(num_heads=2, embed_dim=64, num_layers=2))
    params = init_params(wide)
    # 4,096 or more samples: a standard deviation is known to 2 %, four standard errors below 10 %.
    assert params["blocks.0.attention.qkv.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert params["blocks.1.mlp.output.weight"].std() == pytest.approx(0.02 / 2, rel=0.1)
    assert not params["blocks.0.attention.qkv.bias"].any()
    uniform = init_params(tiny_spec(model=Timaeus(num_heads=2, embed_dim=64)))["blocks.0.mlp.hidden.weight"]
    assert uniform.abs().max() <= 1 / 8
    assert uniform.std() == pytest.approx(1 / 8 / math.sqrt(3), rel=0.1)
