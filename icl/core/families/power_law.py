"""Linear regression whose tasks have a covariance with a power-law spectrum."""

import math
from collections.abc import Mapping
from decimal import Decimal
from functools import reduce
from operator import add
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
class PowerLawTask:
    """y = w.x + eps as `linear`, with w ~ N(0, Sigma): weight d has a variance ~ d^-a, a `exponent`.

    d counts from 1. The variances have the mean 1, so that a = 0 is `linear`. A diagonal Sigma is enough:
    x ~ N(0, I) looks the same in every basis.
    """

    family: Literal["power_law"] = attrs.field(
        default="power_law", validator=choice("power_law"), metadata={"help": "The task family."}
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
    exponent: float = attrs.field(
        default=1.0,
        converter=as_float,
        validator=number(0, 16),
        metadata={"help": "a: weight d of a task has a variance in proportion to d^-a, with mean 1. 0: as linear."},
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
        """`posterior` knows Sigma; `ridge` takes it for the identity."""
        finite = () if self.num_tasks is None else ("dmmse",)
        return ("posterior", "ridge", *gaussian.SIMPLE_BASELINES, *finite)

    @property
    def equal_baselines(self) -> Mapping[str, str]:
        """As M grows dMMSE tends to the posterior mean under all tasks."""
        return {"dmmse": "posterior"} if self.num_tasks is None else {}

    @property
    def baseline_bytes(self) -> int:
        return 8 * self.num_examples**2 * self.task_dim  # the contexts of one sequence

    def draw_inputs(self, rng: "np.random.Generator", batch_size: int) -> "tuple[Floats, Floats]":
        return gaussian.draw_inputs(self, rng, batch_size)

    def draw_tasks(self, rng: "np.random.Generator", count: int) -> "Floats":
        import numpy as np

        return rng.standard_normal((count, self.task_dim), "float32") * np.array(self._deviations(), np.float32)

    def targets(self, xs: "Floats", noise: "Floats", ws: "Floats") -> "Floats":
        return gaussian.linear_targets(self, xs, noise, ws)

    def draw_on_device(self, batch_size: int, pool: "Tensor", generator: "Generator | None") -> "Tree":
        def prior(normal: gaussian.Normal) -> "Tensor":
            ws: Tensor = normal(batch_size, self.task_dim)
            return ws * ws.new_tensor(self._deviations())

        return gaussian.draw_on_device(self, batch_size, pool, generator, prior)

    def predictions(self, xs: "Tensor", ys: "Tensor", pool: "Tensor | None") -> "Mapping[str, Tensor]":
        from icl.core.baselines import dmmse_predictions, ridge_predictions

        inputs = xs.double()
        scaled = inputs * inputs.new_tensor(self._deviations())  # on which a task is N(0, I), and ridge ideal
        found = {
            "posterior": ridge_predictions(scaled, ys, self.noise_variance),
            "ridge": ridge_predictions(xs, ys, self.noise_variance),
            **gaussian.simple_predictions(xs, ys),
        }
        if pool is not None:
            found["dmmse"] = dmmse_predictions(xs, ys, pool, self.noise_variance)
        return found

    def _deviations(self) -> list[float]:
        """The standard deviation of each weight."""
        power = Decimal(-self.exponent)  # not floats, whose powers C libraries round differently
        variances = [float(Decimal(d) ** power) for d in range(1, self.task_dim + 1)]
        mean = reduce(add, variances) / self.task_dim  # not `sum`, which rounds otherwise from Python 3.12 on
        return [math.sqrt(variance / mean) for variance in variances]
