"""Linear regression whose label noise has heavy tails."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs

from icl.core.families import gaussian
from icl.core.rules import COUNT, as_float, choice, finite_or_none, number, optional, with_plain_values

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Generator, Tensor

    from icl.core.backend import Tree
    from icl.core.family import Floats

MIN_SPREAD = 1e-12  # of `_spread`: about the square of what float32 targets are rounded by


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class StudentTTask:
    """y = w.x + eps as `linear`, where eps is Student's t with nu `degrees_of_freedom`, scaled to the variance sigma^2.

    As nu grows it tends to `linear`.
    """

    family: Literal["student_t"] = attrs.field(
        default="student_t", validator=choice("student_t"), metadata={"help": "The task family."}
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
    degrees_of_freedom: float = attrs.field(
        default=3.0,
        converter=as_float,
        validator=number(2, 1e6, above=True),
        metadata={"help": "nu: degrees of freedom of the label noise; the fewer, the heavier its tails."},
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
        """`ridge` is the best linear predictor; `dmmse` knows the noise."""
        return ("ridge", *gaussian.SIMPLE_BASELINES, *(() if self.num_tasks is None else ("dmmse",)))

    @property
    def equal_baselines(self) -> Mapping[str, str]:
        return {}

    @property
    def baseline_bytes(self) -> int:
        return 8 * self.num_examples**2 * self.task_dim  # the contexts of one sequence, for ridge

    def draw_inputs(self, rng: "np.random.Generator", batch_size: int) -> "tuple[Floats, Floats]":
        import numpy as np

        xs, normals = gaussian.draw_inputs(self, rng, batch_size)
        halves = _gammas(rng, self.degrees_of_freedom / 2, normals.size).reshape(normals.shape)
        # t is N(0, 1) / sqrt(chi^2 / nu), of variance nu / (nu - 2); half of chi^2 is a gamma of the shape nu / 2.
        return xs, (normals * np.sqrt((self.degrees_of_freedom / 2 - 1) / halves)).astype(np.float32)

    def draw_tasks(self, rng: "np.random.Generator", count: int) -> "Floats":
        return rng.standard_normal((count, self.task_dim), "float32")

    def targets(self, xs: "Floats", noise: "Floats", ws: "Floats") -> "Floats":
        return gaussian.linear_targets(self, xs, noise, ws)

    def draw_on_device(self, batch_size: int, pool: "Tensor", generator: "Generator | None") -> "Tree":
        import torch

        noiseless = attrs.evolve(self, noise_variance=0.0)
        drawn = gaussian.draw_on_device(
            noiseless, batch_size, pool, generator, lambda normal: normal(batch_size, self.task_dim)
        )
        shape = (2, batch_size, self.num_examples, 1)
        normals = torch.randn(*shape, generator=generator, device=pool.device, dtype=torch.float32)
        # Bailey 1994, which rejects nothing: cos(2 pi V) sqrt(nu (U^(-2 / nu) - 1)) of uniform U and V.
        squares = normals.square().sum(0).clamp(min=torch.finfo(torch.float32).tiny)  # -2 log U
        deviations = ((squares / self.degrees_of_freedom).expm1() / squares * self._spread).sqrt()
        return {**drawn, "ys": drawn["ys"] + normals[0] * deviations}

    def predictions(self, xs: "Tensor", ys: "Tensor", pool: "Tensor | None") -> "Mapping[str, Tensor]":
        from icl.core.baselines import ridge_predictions

        found = {"ridge": ridge_predictions(xs, ys, self.noise_variance), **gaussian.simple_predictions(xs, ys)}
        if pool is not None:
            spread = max(self._spread, MIN_SPREAD)
            found["dmmse"] = student_t_dmmse_predictions(xs, ys, pool, self.degrees_of_freedom, spread)
        return found

    @property
    def _spread(self) -> float:
        """nu times the square of the scale: the density of eps is in proportion to (1 + eps^2 / it)^-((nu + 1) / 2)."""
        return self.noise_variance * (self.degrees_of_freedom - 2)


def _gammas(rng: "np.random.Generator", shape: float, count: int) -> "npt.NDArray[np.float64]":
    """Draws of the gamma distribution of this shape > 1 and of scale 1.

    Not `rng.standard_gamma`: compilers for some processors fuse its additions and products, which rounds otherwise
    (numpy/numpy#22993). Logarithms, which libraries round differently, only decide what is accepted.

    Source: Marsaglia and Tsang 2000.
    """
    import numpy as np

    middle = shape - 1 / 3
    width = 1 / math.sqrt(9 * middle)
    found = np.empty(count)
    missing = np.arange(count)
    while len(missing):
        normals, uniforms = rng.standard_normal(len(missing)), 1 - rng.random(len(missing))
        roots = 1 + width * normals
        cubes = roots * roots * roots
        logs = np.log(np.where(roots > 0, cubes, 1))
        accepted = (roots > 0) & (np.log(uniforms) < normals * normals / 2 + middle * (1 - cubes + logs))
        found[missing[accepted]] = middle * cubes[accepted]
        missing = missing[~accepted]
    return found


def student_t_dmmse_predictions(
    xs: "Tensor", ys: "Tensor", pool: "Tensor", degrees_of_freedom: float, spread: float
) -> "Tensor":
    """The Bayes-optimal prediction of each y under a uniform prior over the M tasks of `pool` and Student's t noise.

    Prediction k is x_k . w_k with w_k the mean of the tasks, weighted by the product of
    (1 + r^2 / spread)^-((nu + 1) / 2) over their residuals r on the first k examples; the plain mean for k = 0.
    Streams over tasks as `icl.core.baselines.dmmse_predictions`; work O(B K M D).

    Args:
        xs: (B, K, D). ys: (B, K, 1). pool: (M, D). spread: sigma^2 (nu - 2) > 0.

    Returns: (B, K, 1) float64.
    """
    import torch

    from icl.core.baselines import BYTE_BUDGET

    tasks_at_once = min(pool.shape[0], 4096)
    rows = max(1, BYTE_BUDGET // (8 * tasks_at_once))
    parts = [
        _dmmse(x.double(), y.double(), torch.split(pool.double(), tasks_at_once), degrees_of_freedom, spread)
        for x, y in zip(torch.split(xs, rows), torch.split(ys, rows), strict=True)
    ]
    return torch.cat(parts)


def _dmmse(
    xs: "Tensor", ys: "Tensor", pool: "tuple[Tensor, ...]", degrees_of_freedom: float, spread: float
) -> "Tensor":
    import torch

    batch, examples, dim = xs.shape
    best = xs.new_full((examples, batch, 1), -math.inf)  # greatest log-likelihood of any task so far, per position
    sums = xs.new_zeros(examples, batch, dim + 1)  # of the weighted tasks, and of the weights
    for tasks in pool:
        tasks_and_one = torch.nn.functional.pad(tasks, (0, 1), value=1.0)
        logs = xs.new_zeros(batch, tasks.shape[0])
        for k in range(examples):
            new_best = torch.maximum(best[k], logs.amax(-1, keepdim=True))
            decay = (best[k] - new_best).exp()
            sums[k] = torch.addmm(sums[k] * decay, (logs - new_best).exp(), tasks_and_one)
            best[k] = new_best
            residuals = torch.addmm(ys[:, k], xs[:, k], tasks.T, beta=-1)
            logs -= (degrees_of_freedom + 1) / 2 * (residuals.square() / spread).log1p()
    ws_hat = sums[..., :-1] / sums[..., -1:]
    return (xs * ws_hat.transpose(0, 1)).sum(-1, keepdim=True)
