"""The trained transformer as a PyTorch module, whose parts are modules that run, and as a function."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from operator import attrgetter, ge
from typing import Any

import torch
from torch import Tensor, nn

from icl.core import model as core_model
from icl.core.architecture import Architecture, Part
from icl.core.architectures import ARCHITECTURES
from icl.core.architectures.blocks import call_blocks
from icl.core.model import computation, parameter_shapes
from icl.core.sequences import require_place, require_sequences, require_shape
from icl.core.spec import Spec


def predict(model: Architecture, params: Mapping[str, Tensor], xs: Tensor, ys: Tensor) -> Tensor:
    """`icl.core.model.predict`, for whom a person calls it: what does not fit is refused in words.

    Args:
        model: the section `model` of a spec.
        params: every parameter by name, on any device. xs: (B, K, D). ys: (B, K, 1); the last one is not read.

    Returns: (B, K, 1).

    Raises: ValueError for what is no such model, for parameters that are missing or have other shapes than the model's
        for such xs, and for inputs that `Predictor` refuses.
    """
    if not torch.compiler.is_compiling():
        _require_fit(model, params, xs, ys)
    return core_model.predict(model, params, xs, ys)


def _require_fit(model: Architecture, params: Mapping[str, Tensor], xs: Tensor, ys: Tensor) -> None:
    if type(model) not in ARCHITECTURES.values():
        raise ValueError(
            f"predict: got a model of type {type(model).__name__}; expected the section `model` of a spec. "
            "Give run.spec.model."
        )
    require_sequences("predict", xs, ys)
    examples, dim = xs.shape[1:]
    needed, longer = (model.shapes(dim, num_examples) for num_examples in (examples, examples + 1))
    for name, shape in needed.items():
        if name not in params:
            raise ValueError(f"predict: got no parameter {name}; expected all of the model's. Give run.params(step).")
        own, grows = tuple(params[name].shape), longer[name] != shape  # by the positions it was trained on
        fits = len(own) == len(shape) and all(map(ge, own, shape)) if grows else own == shape
        if not fits or not examples:
            raise ValueError(
                f"predict: got xs {tuple(xs.shape)} with {name} {own}; expected {'at least ' if grows else ''}{shape} "
                "for these, and K from 1 on. Take the parameters of this model, and inputs of its K and D."
            )
    require_place("predict", next(iter(params.values())), xs=xs, ys=ys)


class PartModule(nn.Module):
    """One part of the transformer, such as `blocks.0.attention`: what its architecture computes, with hooks."""

    def __init__(self, model: Architecture, name: str) -> None:
        super().__init__()
        self._model, self._name = model, name
        self._leaves = list[str]()

    def add(self, leaf: str, value: Tensor) -> None:
        """Give the part a parameter, "weight" or "bias"."""
        self.register_parameter(leaf, nn.Parameter(value.clone()))
        self._leaves.append(leaf)

    def forward(self, *inputs: Any) -> Any:
        """What the part makes of its inputs; see the architecture's `parts`."""
        # As attributes, since what prunes, parametrizes or ties them leaves no parameter of that name.
        own = {f"{self._name}.{leaf}": getattr(self, leaf) for leaf in self._leaves}
        return computation(self._model, self._name)(Part(self._model, own, self._name, self._inner), *inputs)

    def _inner(self, name: str, *inputs: Any) -> Any:
        return _call(self, name.removeprefix(f"{self._name}."), *inputs)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(value.shape)}" for name, value in self.named_parameters(recurse=False))


class Predictor(nn.Module):
    """The trained transformer: `model(xs, ys)` is bit for bit `predict` of its parameters.

    PyTorch multiplies some small matrices in another way when they require gradients. For the bits of
    `predict(spec.model, run.params(step), xs, ys)` at every size, call `model.requires_grad_(False)` first.

    Names and order of the parameters are those of `parameter_shapes`. Every part is a module through which the
    computation goes, so forward hooks fire, and what they return takes the place of the part's output:
    `token_embedding`, `position_embedding`, `blocks.0` (the residual stream after it), `blocks.0.attention_layer_norm`,
    `.attention`, `.attention.qkv`, `.attention.pattern`, `.attention.output`, `.mlp_layer_norm`, `.mlp`, `.mlp.hidden`
    (before the nonlinearity), `.mlp.output`, `final_layer_norm` and `unembedding`.

    What a hook sees is (tokens, B, features), in the order x_1, ..., x_K, y_1, ..., y_(K-1): the last y is not read. In
    the last block only the K x tokens are carried on. `qkv` returns queries, keys and values, (B * H, tokens, E / H)
    each, and `pattern` the attention (B * H, queries, keys); head h of sequence b is at b * H + h. The input of
    `blocks.0.mlp.output` is the hidden layer after the nonlinearity.
    """

    def __init__(self, spec: Spec, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._task, self._model = spec.task, spec.model
        for name in parameter_shapes(spec):
            part, _, leaf = name.rpartition(".")
            self._part(part).add(leaf, params[name])
            if part.endswith(".qkv"):
                self._part(part.removesuffix("qkv") + "pattern")

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        """The prediction (B, K, 1) of every y from the examples before it.

        Args:
            xs: (B, K, D), K at most the spec's `num_examples`. ys: (B, K, 1); the last one is not read.

        Raises: ValueError for other shapes, or a dtype or device that is not the parameters'; also when a hook, or a
            module put in the place of a part, changes the shape of what is carried on.
        """
        self._require("model", xs, ys)
        predictions = self._model.predict(partial(_call, self), xs, ys)
        require_shape("unembedding", predictions.transpose(0, 1), (xs.shape[1], xs.shape[0], 1))
        return predictions

    def attention_patterns(self, xs: Tensor, ys: Tensor) -> list[Tensor]:
        """How much every token attends to every other: for each layer (B, H, 2K, 2K), queries before keys.

        Tokens are in the order x_1, y_1, x_2, y_2, ..., x_K, y_K. All 2K are carried through every layer, also those
        that `forward` leaves out because nothing reads them: y tokens in the last layer and y_K in all. Entries are 0
        for later tokens, and rows sum to 1 under a softmax. Otherwise the computation is that of `forward`: through
        every part, whatever has taken its place, with its hooks.

        Raises: ValueError as `forward`, and when a part that gives a pattern was replaced by one that gives none.
        """
        self._require("attention_patterns", xs, ys)
        batch, examples, _ = xs.shape
        found: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for name, part in self.named_modules():
                if name.endswith(".pattern"):  # the last hook, which sees what those before it have changed
                    hook = part.register_forward_hook(lambda _, inputs, output, name=name: found.update({name: output}))
                    stack.callback(hook.remove)
            call_blocks(partial(_call, self), self._model.num_layers, xs, ys, num_queries=2 * examples)
        places = torch.arange(2 * examples, device=xs.device).view(2, examples).T.reshape(-1)  # of x_1, y_1, x_2, ...
        shape = (batch, self._model.num_heads, 2 * examples, 2 * examples)
        patterns = []
        for layer in range(self._model.num_layers):
            name = f"blocks.{layer}.attention.pattern"
            if name not in found:
                raise ValueError(
                    f"attention_patterns: got a {name} that did not run; expected one in every block. Leave the part "
                    "that calls it in its place, or read attention from the module in its place."
                )
            require_shape(name, found[name], (batch * shape[1], *shape[2:]))
            patterns.append(found[name].reshape(shape)[:, :, places][..., places])
        return patterns

    def _require(self, where: str, xs: Tensor, ys: Tensor) -> None:
        require_sequences(where, xs, ys, dim=self._task.task_dim, most=self._task.num_examples)
        require_place(where, next(self.parameters()), xs=xs, ys=ys)

    def _part(self, name: str) -> Any:
        """The module of that name, made with those around it unless it is there."""
        owner_name, _, leaf = name.rpartition(".")
        owner = self._part(owner_name) if owner_name else self
        if leaf not in owner._modules:
            owner.add_module(leaf, nn.ModuleList() if name == "blocks" else PartModule(self._model, name))
        return owner.get_submodule(leaf)


def _call(owner: nn.Module, name: str, *inputs: Any) -> Any:
    """What the module of that name inside `owner` makes of its inputs; `get_submodule` is not for torch.compile."""
    return attrgetter(name)(owner)(*inputs)
