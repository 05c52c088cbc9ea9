"""Noisy linear regression with Gaussian tasks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs

from icl.core.families import gaussian
from icl.core.rules import COUNT, as_float, choice, finite_or_none, number, optional, with_plain_values

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor

    from icl.core.backend import Tree
    from icl.core.family import Floats


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class LinearTask:
    """y = w.x + eps with w and x ~ N(0, I_D), eps ~ N(0, sigma^2)."""

    family: Literal["linear"] = attrs.field(
        default="linear", validator=choice("linear"), metadata={"help": "The task family."}
    )
    task_dim: int = attrs.field(validator=COUNT, metadata={"help": "D: dimension of x and of a task vector."})
    num_examples: int = attrs.field(
        validator=COUNT, metadata={"help": "K: in-context examples in a sequence; prediction k has seen k of them."}
    )
    num_tasks: int | None = attrs.field(
        default=None,
        converter=finite_or_none,
        validator=optional(COUNT),
        metadata={
            "help": 'M: tasks in the pretraining pool. null (or "inf"): every task is drawn afresh from the prior.'
        },
    )
    noise_variance: float = attrs.field(
        default=0.125,
        converter=as_float,
        validator=number(0),
        metadata={"help": "sigma^2: variance of the label noise, not its standard deviation."},
    )

    @property
    def task_size(self) -> int:
        return self.task_dim

    @property
    def baselines(self) -> tuple[str, ...]:
        return ("ridge",) if self.num_tasks is None else ("ridge", "dmmse")

    @property
    def equal_baselines(self) -> Mapping[str, str]:
        """Under a Gaussian task prior dMMSE is ridge, to which it tends as M grows."""
        return {"dmmse": "ridge"} if self.num_tasks is None else {}

    @property
    def baseline_bytes(self) -> int:
        return 8 * self.num_examples**2 * self.task_dim  # the contexts of one sequence

    def draw_inputs(self, rng: "np.random.Generator", batch_size: int) -> "tuple[Floats, Floats]":
        return gaussian.draw_inputs(self, rng, batch_size)

    def draw_tasks(self, rng: "np.random.Generator", count: int) -> "Floats":
        return rng.standard_normal((count, self.task_dim), "float32")

    def targets(self, xs: "Floats", noise: "Floats", ws: "Floats") -> "Floats":
        return gaussian.linear_targets(self, xs, noise, ws)

    def draw_on_device(self, batch_size: int, pool: "Tensor", generator: "Generator | None") -> "Tree":
        return gaussian.draw_on_device(
            self, batch_size, pool, generator, lambda normal: normal(batch_size, self.task_dim)
        )

    def predictions(self, xs: "Tensor", ys: "Tensor", pool: "Tensor | None") -> "Mapping[str, Tensor]":
        from icl.core.baselines import dmmse_predictions, ridge_predictions

        found = {"ridge": ridge_predictions(xs, ys, self.noise_variance)}
        if pool is not None:
            found["dmmse"] = dmmse_predictions(xs, ys, pool, self.noise_variance)
        return found
