"""The trained transformer under what PyTorch does to modules: compiled, exported, mapped, copied, saved, moved."""

import copy
import io

import pytest
import torch
from torch import Tensor

import icl
from icl.core.architectures import ARCHITECTURES
from icl.core.model import init_params, predict
from icl.core.spec import Spec
from icl.predictor import Predictor
from tests.predictors import MODELS, SPECS, random_params, sequences


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> Spec:
    return SPECS[request.param]


def test_it_can_be_copied_converted_and_called_functionally(spec: Spec) -> None:
    (xs, ys), params = sequences(spec), random_params(spec)
    model = Predictor(spec, params)
    assert torch.func.functional_call(model, init_params(spec), (xs, ys)).equal(
        predict(spec.model, init_params(spec), xs, ys)
    )
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert model.requires_grad_(False)(xs, ys).equal(predict(spec.model, params, xs, ys))
    # float32 against float64, relative to the largest of values that these random parameters make large.
    double = model.double()(xs.double(), ys.double())
    assert (double - predict(spec.model, params, xs, ys)).abs().max() < 1e-4 * double.abs().max()


def test_every_architecture_is_among_the_models() -> None:
    assert {type(model) for model in MODELS.values()} == {*ARCHITECTURES.values()}


def test_it_compiles_as_one_graph(spec: Spec) -> None:
    """Traced whole, forwards and backwards; what a compiler makes of the graph is its own."""
    (xs, ys), model = sequences(spec), Predictor(spec, random_params(spec))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = model(xs, ys)
    torch.testing.assert_close(compiled(xs, ys), expected)
    params = {name: value.detach() for name, value in model.named_parameters()}
    function = torch.compile(icl.predict, backend="eager", fullgraph=True)
    torch.testing.assert_close(function(spec.model, params, xs, ys), expected)
    exported = torch.export.export(model, (xs, ys), strict=True).module()
    torch.testing.assert_close(exported(xs, ys), expected)
    (found, wanted) = (torch.autograd.grad(one(xs, ys).sum(), list(model.parameters())) for one in (compiled, model))
    torch.testing.assert_close(found, wanted)


def test_it_is_mapped_saved_and_moved(spec: Spec) -> None:
    """Several models at once, gradients a sequence, pickles, meta tensors."""
    xs, ys = sequences(spec)
    models = [Predictor(spec, random_params(spec)), Predictor(spec, init_params(spec))]
    stacked, _ = torch.func.stack_module_state(models)
    each = [model(xs, ys) for model in models]
    frame = copy.deepcopy(models[0]).to("meta")

    def called(params: dict[str, Tensor]) -> Tensor:
        predictions: Tensor = torch.func.functional_call(models[1], params, (xs, ys))
        return predictions

    mapped = torch.vmap(called)(stacked)
    functions = torch.vmap(lambda params: icl.predict(spec.model, params, xs, ys))(stacked)
    for found, alone, functional in zip(mapped, each, functions, strict=True):
        # Other kernels for batches of matrices: float32 rounding relative to the largest of values that may be large.
        assert (found - alone).abs().max() < 1e-4 * alone.abs().max()
        assert functional.equal(found)
    params = {name: value.detach() for name, value in models[0].named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return icl.predict(spec.model, params, x[None], y[None]).square().sum()

    grads = torch.vmap(torch.func.grad(loss), (None, 0, 0))(params, xs, ys)
    assert grads["unembedding.weight"].shape == (6, *params["unembedding.weight"].shape)
    file = io.BytesIO()
    torch.save(models[0], file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(xs, ys).equal(each[0])
    assert frame(xs.to("meta"), ys.to("meta")).device.type == "meta"
