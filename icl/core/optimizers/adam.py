"""Adam, with decoupled weight decay and clipping of the global norm."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs

from icl.core.optimizer import by_member
from icl.core.optimizers.clipping import clip_by_global_norm
from icl.core.rules import as_float, as_floats, choice, number, optional, tuple_of, with_plain_values

if TYPE_CHECKING:
    from torch import Tensor

    from icl.core.backend import Tree
    from icl.core.optimizer import Number


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class Adam:
    """Adam, or AdamW if `weight_decay` is given.

    It tracks `torch.optim.Adam` or `AdamW`, and `optax.adam`, up to rounding.
    Its state is `mu` and `nu`, the first and second moments, zero at step 0.

    Source: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019 for the decay.
    """

    name: Literal["adam"] = attrs.field(default="adam", validator=choice("adam"), metadata={"help": "The optimiser."})
    betas: tuple[float, float] = attrs.field(
        default=(0.9, 0.999),
        converter=as_floats,
        validator=tuple_of(number(0, 1, below=True), 2),
        metadata={"help": "beta1 and beta2: decay of the first and of the second moment of the gradient."},
    )
    eps: float = attrs.field(
        default=1e-8,
        converter=as_float,
        validator=number(0, above=True),
        metadata={"help": "epsilon: added to the root of the second moment."},
    )
    weight_decay: float = attrs.field(
        default=0.0,
        converter=as_float,
        validator=number(0),
        metadata={"help": "Decoupled decay of every parameter, times the learning rate. 0: none."},
    )
    max_grad_norm: float | None = attrs.field(
        default=None,
        converter=as_float,
        validator=optional(number(0, above=True)),
        metadata={"help": "Largest 2-norm of the gradient, which is scaled down to it. null: no clipping."},
    )

    @property
    def leaves(self) -> tuple[str, ...]:
        return ("mu", "nu")

    @property
    def hyperparameters(self) -> "Mapping[str, float]":
        numbers = {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}
        if self.weight_decay:
            numbers["weight_decay"] = self.weight_decay
        if self.max_grad_norm is not None:
            numbers["max_grad_norm"] = self.max_grad_norm
        return numbers

    def init(self, params: "Tensor") -> "Tree":
        return {leaf: params.new_zeros(params.shape) for leaf in self.leaves}

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
        given = {name: by_member(value) for name, value in given.items()}
        beta1, beta2 = given["beta1"], given["beta2"]
        if "max_grad_norm" in given:
            grads = clip_by_global_norm(grads, given["max_grad_norm"])
        mu = state["mu"] * beta1 + grads * (1 - beta1)
        nu = state["nu"] * beta2 + grads.square() * (1 - beta2)
        count, lr = (step + 1).to(params.dtype)[..., None], lr[..., None]
        update = (mu / _bias_correction(beta1, count)) / ((nu / _bias_correction(beta2, count)).sqrt() + given["eps"])
        if "weight_decay" in given:
            params = params - lr * given["weight_decay"] * params
        return params - lr * update, {"mu": mu, "nu": nu}


def _bias_correction(beta: "Number", count: "Tensor") -> "Tensor":
    """1 - beta**count, accurate for beta near 1 because the power is never rounded to 1."""
    if isinstance(beta, float):
        return -(count * (math.log(beta) if beta > 0 else -math.inf)).expm1()
    return -(count * beta.log()).expm1()
