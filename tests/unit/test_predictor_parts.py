"""The parts of the trained transformer: hooks, what is put in their place, and attention with both."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from icl.core.model import parameter_shapes, predict
from icl.core.spec import Spec
from icl.predictor import Predictor
from icl.testing import tiny_spec
from tests.predictors import MODELS, SPECS, fields, has_mlp, random_params, recorded, sequences


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> Spec:
    return SPECS[request.param]


def test_hooks_fire_in_every_part(spec: Spec) -> None:
    xs, ys = sequences(spec)
    model = Predictor(spec, random_params(spec))
    seen = recorded(model)
    model(xs, ys)
    order = [name for name, _ in seen]
    assert sorted(order) == sorted(name for name, _ in model.named_modules() if name != "blocks")
    held = {name.rpartition(".")[0] for name in parameter_shapes(spec)}
    assert held <= set(order)
    inner_parts = ("", ".attention", ".mlp") if has_mlp(spec) else ("", ".attention")
    assert {f"blocks.{spec.model.num_layers - 1}{inner}" for inner in inner_parts} <= set(order)


def test_hooks_see_the_documented_shapes(spec: Spec) -> None:
    (xs, ys), model = sequences(spec), Predictor(spec, random_params(spec))
    seen = recorded(model)
    model(xs, ys)
    outputs = dict(seen)
    batch, examples, _ = xs.shape
    embed, heads = fields(spec).embed_dim, fields(spec).num_heads
    tokens, last = 2 * examples - 1, spec.model.num_layers - 1
    assert outputs["token_embedding"].shape == (tokens, batch, embed)
    for layer in range(last + 1):
        queries = examples if layer == last else tokens
        assert outputs[f"blocks.{layer}"].shape == (queries, batch, embed)
        if has_mlp(spec):
            assert outputs[f"blocks.{layer}.mlp.hidden"].shape == (queries, batch, fields(spec).mlp_dim)
        assert outputs[f"blocks.{layer}.attention.pattern"].shape == (batch * heads, queries, tokens)
        assert [part.shape[1] for part in outputs[f"blocks.{layer}.attention.qkv"]] == [queries, tokens, tokens]
    natural = Predictor(spec, random_params(spec)).attention_patterns(xs, ys)[last][:, :, ::2]
    seen_pattern = outputs[f"blocks.{last}.attention.pattern"].view(batch, heads, examples, tokens)
    # Other matrix shapes may add in another order: float32 rounding of values of at most 1.
    torch.testing.assert_close(seen_pattern[..., :examples], natural[..., ::2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen_pattern[..., examples:], natural[..., 1:-1:2], rtol=1e-5, atol=1e-5)


def test_what_a_hook_returns_takes_the_place_of_the_output(spec: Spec) -> None:
    """An ablation: without attention no prediction can depend on another token."""
    (xs, ys), model = sequences(spec), Predictor(spec, random_params(spec))
    changed = ys.flip(1)
    assert not model(xs, ys).equal(model(xs, changed))
    for name, part in model.named_modules():
        if name.endswith(".attention"):
            part.register_forward_hook(lambda _, inputs, output: torch.zeros_like(output))
    assert model(xs, ys).equal(model(xs, changed))


def test_a_part_runs_alone(spec: Spec) -> None:
    (xs, ys), params = sequences(spec), random_params(spec)
    model = Predictor(spec, params)
    seen = recorded(model)
    predicted = model(xs, ys)
    residual = dict(seen)[f"blocks.{spec.model.num_layers - 1}"]
    read_out = model.get_submodule("final_layer_norm")(residual) if fields(spec).layer_norm else residual
    assert model.get_submodule("unembedding")(read_out).transpose(0, 1).equal(predicted)


def doubled(part: nn.Module) -> nn.Module:
    """A module of a user, around one of ours."""

    class Doubled(nn.Module):
        def forward(self, *inputs: Any) -> Any:
            return tuple(2 * output for output in part(*inputs))

    return Doubled()


def test_attention_is_that_of_the_forward_pass_that_would_happen(spec: Spec) -> None:
    """With modules put in the place of parts, and with what hooks return; first y at 1 among the keys, first x at 0."""
    (xs, ys), replaced, hooked = sequences(spec), *(Predictor(spec, random_params(spec)) for _ in range(2))
    before = replaced.attention_patterns(xs, ys)
    replaced.get_submodule("blocks.0.attention").add_module(
        "qkv", doubled(replaced.get_submodule("blocks.0.attention.qkv"))
    )
    hooked.get_submodule("blocks.0.attention.qkv").register_forward_hook(
        lambda _, inputs, output: tuple(2 * part for part in output)
    )
    hooked.get_submodule("blocks.0.attention.pattern").register_forward_hook(lambda _, inputs, output: output / 2)
    for model, scale in ((replaced, 1), (hooked, 2)):
        seen = dict[str, Any]()
        watched = model.get_submodule("blocks.0.attention.pattern")
        handle = watched.register_forward_hook(lambda _, inputs, output: seen.update(pattern=output))  # noqa: B023
        model(xs, ys)
        handle.remove()
        found = model.attention_patterns(xs, ys)
        assert not watched._forward_hooks or model is hooked  # none of ours is left
        heads, examples = fields(spec).num_heads, xs.shape[1]
        seen_pattern = seen["pattern"].view(len(xs), heads, *seen["pattern"].shape[1:])[:, :, :examples, :examples]
        # Other matrix shapes may add in another order: float32 rounding of values of at most 1.
        torch.testing.assert_close(found[0][:, :, ::2, ::2], seen_pattern, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(scale * found[0], before[0])
        if fields(spec).architecture != "linear_attention":  # the rows of a softmax
            torch.testing.assert_close(found[0].sum(-1), torch.full_like(found[0][..., 0], 1 / scale))


def test_attention_of_a_part_that_has_none_is_refused(spec: Spec) -> None:
    class Nothing(nn.Module):
        def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
            return torch.zeros(mask.shape[0], *inputs.shape[1:])

    (xs, ys), model = sequences(spec), Predictor(spec, random_params(spec))
    model.get_submodule("blocks.0").add_module("attention", Nothing())
    assert model(xs, ys).shape == ys.shape
    with pytest.raises(ValueError, match=r"^attention_patterns: got a blocks\.0\.attention\.pattern that did not run;"):
        model.attention_patterns(xs, ys)


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("wrong", ["tokens", "batch", "axes", "type"])
def test_a_hook_that_returns_another_shape_is_refused(spec: Spec, wrong: str, layer: int) -> None:
    """All tokens after the last block, say, of which only those of x are carried on."""
    (xs, ys), model = sequences(spec), Predictor(spec, random_params(spec))
    name = f"blocks.{layer % spec.model.num_layers}"
    changed: dict[str, Any] = {
        "tokens": lambda output: torch.cat([output, output]),
        "batch": lambda output: output.mean(1, keepdim=True),
        "axes": lambda output: output[None],
        "type": lambda output: (output,),
    }
    change = changed[wrong]
    handle = model.get_submodule(name).register_forward_hook(lambda _, inputs, output: change(output))
    for call, where in ((model, name), (model.attention_patterns, name)):
        with pytest.raises(ValueError, match=rf"^{where}: got output .*; expected a tensor \(\d+, 6, 8\)\. "):
            call(xs, ys)
    handle.remove()
    if wrong != "type":
        model.get_submodule("unembedding").register_forward_hook(lambda _, inputs, output: change(output))
        with pytest.raises(ValueError, match=r"^unembedding: got output .*; expected a tensor \(4, 6, 1\)\. "):
            model(xs, ys)


@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_what_takes_the_place_of_a_parameter_is_used(leaf: str) -> None:
    """Pruning, parametrizations, tying and plain tensors leave no unique parameter of that name."""
    spec = tiny_spec(model=MODELS["timaeus"])
    params, (xs, ys) = random_params(spec), sequences(spec)
    expected = predict(spec.model, params, xs, ys)

    def model() -> Any:
        return Predictor(spec, params).requires_grad_(False)

    pruned, parametrized, plain, tied = model(), model(), model(), model()
    prune.identity(pruned.blocks[0].mlp.hidden, leaf)  # type: ignore[no-untyped-call]
    parametrize.register_parametrization(parametrized.final_layer_norm, leaf, nn.Identity())
    delattr(plain.final_layer_norm, leaf)
    setattr(plain.final_layer_norm, leaf, params[f"final_layer_norm.{leaf}"])
    for one in (pruned, parametrized, plain):
        assert torch.equal(one(xs, ys), expected)
    setattr(tied.blocks[1].mlp_layer_norm, leaf, getattr(tied.blocks[0].mlp_layer_norm, leaf))
    shared = {**params, f"blocks.1.mlp_layer_norm.{leaf}": params[f"blocks.0.mlp_layer_norm.{leaf}"]}
    assert torch.equal(tied(xs, ys), predict(spec.model, shared, xs, ys))
