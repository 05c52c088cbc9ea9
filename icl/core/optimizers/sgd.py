"""Stochastic gradient descent with momentum."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs

from icl.core.optimizer import by_member
from icl.core.optimizers.clipping import clip_by_global_norm
from icl.core.rules import as_float, choice, number, optional, with_plain_values

if TYPE_CHECKING:
    from torch import Tensor

    from icl.core.backend import Tree
    from icl.core.optimizer import Number


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class SGD:
    """Gradient descent with heavy-ball momentum.

    It tracks `torch.optim.SGD` (no dampening) up to rounding. Its state is `velocity`, zero at step 0.

    Source: Polyak 1964; Sutskever et al. 2013 for the form.
    """

    name: Literal["sgd"] = attrs.field(default="sgd", validator=choice("sgd"), metadata={"help": "The optimiser."})
    momentum: float = attrs.field(
        default=0.9,
        converter=as_float,
        validator=number(0, 1, below=True),
        metadata={"help": "Part of the velocity that each update keeps. 0: none."},
    )
    max_grad_norm: float | None = attrs.field(
        default=None,
        converter=as_float,
        validator=optional(number(0, above=True)),
        metadata={"help": "Largest 2-norm of the gradient, which is scaled down to it. null: no clipping."},
    )

    @property
    def leaves(self) -> tuple[str, ...]:
        return ("velocity",)

    @property
    def hyperparameters(self) -> "Mapping[str, float]":
        clipping = {} if self.max_grad_norm is None else {"max_grad_norm": self.max_grad_norm}
        return {"momentum": self.momentum, **clipping}

    def init(self, params: "Tensor") -> "Tree":
        return {"velocity": params.new_zeros(params.shape)}

    def update(
        self,
        params: "Tensor",
        grads: "Tensor",
        state: "Tree",
        step: "Tensor",
        lr: "Tensor",
        hyperparameters: "Mapping[str, Number] | None" = None,
    ) -> "tuple[Tensor, Tree]":
        given = self.hyperparameters if hyperparameters is None else hyperparameters
        if "max_grad_norm" in given:
            grads = clip_by_global_norm(grads, by_member(given["max_grad_norm"]))
        velocity = state["velocity"] * by_member(given["momentum"]) + grads
        return params - lr[..., None] * velocity, {"velocity": velocity}
