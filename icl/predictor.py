"""The trained transformer as a PyTorch module, whose parts are modules that run."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from icl.core.architecture import Architecture, Part
from icl.core.model import attention_patterns, computation, parameter_shapes
from icl.core.sequences import require_place, require_sequences
from icl.core.spec import Spec


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
        return self.get_submodule(name.removeprefix(f"{self._name}."))(*inputs)

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

        Raises: ValueError for other shapes, or a dtype or device that is not the parameters'.
        """
        self._require("model", xs, ys)
        return self._model.predict(lambda name, *inputs: self.get_submodule(name)(*inputs), xs, ys)

    def attention_patterns(self, xs: Tensor, ys: Tensor) -> list[Tensor]:
        """How much every token attends to every other: for each layer (B, H, 2K, 2K), queries before keys.

        Tokens are in the order x_1, y_1, ..., x_K, y_K; see `icl.core.model.attention_patterns`. Hooks do not fire.

        Raises: ValueError as `forward`.
        """
        self._require("attention_patterns", xs, ys)
        return attention_patterns(self._model, dict(self.named_parameters()), xs, ys)

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
