"""The trained transformer as a module: bits, names, order, attention, and what it says of wrong inputs."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import icl
from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.model import init_params, parameter_shapes, predict
from icl.core.spec import Spec
from icl.predictor import Predictor
from icl.testing import tiny_spec
from tests.predictors import MODELS, SPECS, fields, random_params, recorded, sequences


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> Spec:
    return SPECS[request.param]


@pytest.mark.parametrize("examples", [1, 2, 4, 9])
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_predict_bit_for_bit(name: str, examples: int) -> None:
    spec = tiny_spec(model=MODELS[name], task=LinearTask(task_dim=3, num_examples=examples))
    params, (xs, ys) = random_params(spec), sequences(spec)
    model = Predictor(spec, params)
    watched = copy.deepcopy(model)
    recorded(watched)
    for one in (model, watched):
        for k in range(1, examples + 1):
            seen = xs[:, :k], ys[:, :k]
            assert torch.equal(one(*seen), predict(spec.model, dict(one.named_parameters()), *seen))
        one.requires_grad_(False)
        assert torch.equal(one(xs, ys), predict(spec.model, params, xs, ys))


def test_gradients_are_those_of_predict(spec: Spec) -> None:
    params, (xs, ys) = random_params(spec), sequences(spec)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    model = Predictor(spec, params)
    expected = torch.autograd.grad(predict(spec.model, leaves, xs, ys).square().sum(), list(leaves.values()))
    found = torch.autograd.grad(model(xs, ys).square().sum(), list(model.parameters()))
    assert all(ours.equal(theirs) for ours, theirs in zip(found, expected, strict=True))


def test_names_and_order_are_those_of_the_checkpoint(spec: Spec) -> None:
    """Whatever the order in which a library hands the tensors over: two models of one step are one vector."""
    params = random_params(spec)
    backwards = Predictor(spec, dict(reversed(params.items())))
    assert [name for name, _ in backwards.named_parameters()] == list(parameter_shapes(spec))
    assert list(backwards.state_dict()) == list(parameter_shapes(spec))
    flat = [nn.utils.parameters_to_vector(one.parameters()) for one in (backwards, Predictor(spec, params))]
    assert flat[0].equal(flat[1])
    other = Predictor(spec, init_params(spec))
    other.load_state_dict(params)
    assert identical(dict(other.state_dict()), params)


def direct_patterns(spec: Spec, params: dict[str, Tensor], xs: Tensor, ys: Tensor) -> list[Tensor]:
    """Attention as the papers write it: one sequence, one head, one token after another, in the order x_1, y_1, ..."""
    model, examples = fields(spec), xs.shape[1]
    width, size = model.embed_dim, model.embed_dim // model.num_heads

    def linear(name: str, inputs: Tensor) -> Tensor:
        return inputs @ params[f"{name}.weight"].T + params.get(f"{name}.bias", torch.zeros(()))

    def norm(name: str, inputs: Tensor) -> Tensor:
        if not model.layer_norm:
            return inputs
        centred = inputs - inputs.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]

    found = [torch.zeros(len(xs), model.num_heads, 2 * examples, 2 * examples) for _ in range(model.num_layers)]
    for b in range(len(xs)):
        rows = []
        for k in range(examples):
            rows += [torch.cat([torch.zeros(1), xs[b, k]]), torch.cat([ys[b, k], torch.zeros(xs.shape[-1])])]
        residual = linear("token_embedding", torch.stack(rows)) + params["position_embedding.weight"][: 2 * examples]
        for layer in range(model.num_layers):
            block, mixed = f"blocks.{layer}", torch.zeros_like(residual)
            projected = linear(f"{block}.attention.qkv", norm(f"{block}.attention_layer_norm", residual))
            for head in range(model.num_heads):
                at = slice(head * size, (head + 1) * size)
                query, key, value = (projected[:, i * width : (i + 1) * width][:, at] for i in range(3))
                for t in range(2 * examples):
                    exponents = (key[: t + 1] @ query[t] / math.sqrt(size)).exp()
                    found[layer][b, head, t, : t + 1] = exponents / exponents.sum()
                mixed[:, at] = found[layer][b, head] @ value
            attended = residual + (linear(f"{block}.attention.output", mixed) if model.attention_output else mixed)
            hidden = linear(f"{block}.mlp.hidden", norm(f"{block}.mlp_layer_norm", attended))
            gpt2 = model.architecture == "raventos"
            active = nn.functional.gelu(hidden, approximate="tanh") if gpt2 else hidden.clamp(min=0)
            after = attended + linear(f"{block}.mlp.output", active)
            residual = after if gpt2 else residual + after
    return found


@pytest.mark.parametrize("examples", [1, 4, 9])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "linear_attention"])  # it has a test of its own
def test_attention_is_as_the_papers_write_it(name: str, examples: int) -> None:
    spec = tiny_spec(model=MODELS[name], task=LinearTask(task_dim=3, num_examples=examples))
    xs, ys = (leaf.double() for leaf in sequences(spec, batch=2))
    # A tenth of standard normal weights, so that no row of attention is a single key.
    model = Predictor(spec, {key: value / 10 for key, value in random_params(spec).items()}).double()
    patterns = model.attention_patterns(xs, ys)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        expected = direct_patterns(spec, {key: value.detach() for key, value in model.named_parameters()}, xs, ys)
    finally:
        torch.set_default_dtype(default)
    assert len(patterns) == spec.model.num_layers
    for found, wanted in zip(patterns, expected, strict=True):
        assert found.shape == (2, fields(spec).num_heads, 2 * examples, 2 * examples)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)  # float64 throughout


def wrong_inputs() -> dict[str, tuple[Any, Any, str]]:
    xs, ys = sequences(tiny_spec())
    return {
        "ys without its last axis": (
            xs,
            ys[..., 0],
            r"got ys \(6, 4\).*expected a tensor \(6, 4, 1\).*ys\[\.\.\., None\]",
        ),
        "ys of two numbers": (xs, ys.expand(6, 4, 2), r"got ys \(6, 4, 2\).*expected a tensor \(6, 4, 1\)"),
        "fewer ys": (xs, ys[:, :3], r"got ys \(6, 3, 1\).*expected a tensor \(6, 4, 1\)"),
        "another batch": (xs, ys[:5], r"got ys \(5, 4, 1\).*expected a tensor \(6, 4, 1\)"),
        "more examples": (xs.repeat(1, 2, 1), ys.repeat(1, 2, 1), r"got xs \(6, 8, 3\).*K from 1 to 4"),
        "no examples": (xs[:, :0], ys[:, :0], r"got xs \(6, 0, 3\).*K from 1 to 4"),
        "another dimension": (xs[..., :2], ys, r"got xs \(6, 4, 2\).*expected .*\(B, K, 3\)"),
        "one sequence": (xs[0], ys[0], r"got xs \(4, 3\).*expected .*\(B, K, 3\)"),
        "integers": (xs.long(), ys.long(), r"got xs .*torch\.int64.*expected torch\.float32 on cpu"),
        "an array": (xs.numpy(), ys, "got xs of type ndarray; expected a tensor"),
        "an array of ys": (xs, ys.numpy(), r"got ys of type ndarray; expected a tensor \(6, 4, 1\)"),
        "float64": (xs.double(), ys.double(), r"got xs .*float64.*expected torch\.float32 on cpu"),
        "float64 ys": (xs, ys.double(), r"got ys .*float64.*expected torch\.float32 on cpu"),
        "another device": (xs.to("meta"), ys.to("meta"), r"got xs .*on meta.*expected torch\.float32 on cpu"),
        "ys elsewhere": (xs, ys.to("meta"), r"got ys .*on meta.*expected torch\.float32 on cpu"),
    }


@pytest.mark.parametrize("case", wrong_inputs())
def test_wrong_inputs_are_explained(case: str) -> None:
    xs, ys, words = wrong_inputs()[case]
    model = Predictor(tiny_spec(), init_params(tiny_spec()))
    with pytest.raises(ValueError, match=rf"^model: {words}"):
        model(xs, ys)
    with pytest.raises(ValueError, match=rf"^attention_patterns: {words}"):
        model.attention_patterns(xs, ys)
    with pytest.raises(ValueError, match=r"^predict: got [xy]s "):
        icl.predict(tiny_spec().model, init_params(tiny_spec()), xs, ys)


def test_a_wrong_model_or_wrong_parameters_are_explained() -> None:
    spec = tiny_spec()
    params, (xs, ys) = init_params(spec), sequences(spec)
    assert icl.predict(spec.model, params, xs[:, :2], ys[:, :2]).equal(
        predict(spec.model, params, xs[:, :2], ys[:, :2])
    )
    with pytest.raises(ValueError, match=r"^predict: got a model of type Spec; .* Give run\.spec\.model"):
        icl.predict(spec, params, xs, ys)  # type: ignore[arg-type]
    lacking = {name: value for name, value in params.items() if name != "unembedding.bias"}
    with pytest.raises(ValueError, match=r"^predict: got no parameter unembedding\.bias;"):
        icl.predict(spec.model, lacking, xs, ys)
    other = params | {"blocks.0.mlp.output.weight": torch.zeros(3, 3)}
    with pytest.raises(
        ValueError, match=r"^predict: got .* with blocks\.0\.mlp\.output\.weight \(3, 3\); expected \(8, 8\)"
    ):
        icl.predict(spec.model, other, xs, ys)


def test_any_k_up_to_the_specs_is_fine() -> None:
    spec = tiny_spec()
    xs, ys = sequences(spec)
    model = Predictor(spec, init_params(spec))
    assert [tuple(model(xs[:, :k], ys[:, :k]).shape) for k in (1, 4)] == [(6, 1, 1), (6, 4, 1)]
    assert np.isfinite(model(xs, ys).detach().numpy()).all()
