"""Linear regression whose tasks have few non-zero weights."""

import math
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import attrs

from icl.core.errors import SpecError
from icl.core.families import gaussian
from icl.core.rules import COUNT, as_float, choice, finite_or_none, number, optional, with_plain_values

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor

    from icl.core.backend import Tree
    from icl.core.family import Floats

MAX_COVARIANCES = 1 << 16  # numbers in the posterior covariances of all supports; more take minutes
MIN_NOISE_VARIANCE = 1e-12  # about the square of what float32 targets are rounded by
LASSO_PENALTY = 0.01
LASSO_SWEEPS = 100


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class SparseLinearTask:
    """y = w.x + eps as `linear`, where only s `num_nonzero` weights of w are not zero: N(0, 1), at random places.

    Source: Garg et al. 2022, with D = 20, s = 3 and no noise.
    """

    family: Literal["sparse_linear"] = attrs.field(
        default="sparse_linear", validator=choice("sparse_linear"), metadata={"help": "The task family."}
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
    num_nonzero: int = attrs.field(
        default=3, validator=COUNT, metadata={"help": "s: weights of a task that are not zero; at most task_dim."}
    )
    noise_variance: float = attrs.field(
        default=0.0,
        converter=as_float,
        validator=number(0),
        metadata={"help": "sigma^2: variance of the label noise, not its standard deviation."},
    )

    def __attrs_post_init__(self) -> None:
        if self.num_nonzero > self.task_dim:
            raise SpecError(f"num_nonzero: got {self.num_nonzero}; expected at most task_dim={self.task_dim}.")

    @property
    def task_size(self) -> int:
        return self.task_dim

    @property
    def baselines(self) -> tuple[str, ...]:
        """The posterior mean where the supports are few enough to go through all of them."""
        ideal = ("posterior",) if _are_few(self.task_dim, self.num_nonzero) else ()
        return (*ideal, "lasso", *gaussian.SIMPLE_BASELINES, *(() if self.num_tasks is None else ("dmmse",)))

    @property
    def equal_baselines(self) -> Mapping[str, str]:
        """As M grows dMMSE tends to the posterior mean under all tasks."""
        return {"dmmse": "posterior"} if self.num_tasks is None and "posterior" in self.baselines else {}

    @property
    def baseline_bytes(self) -> int:
        return 8 * self.num_examples**2 * self.task_dim  # the contexts of one sequence, for least squares

    def draw_inputs(self, rng: "np.random.Generator", batch_size: int) -> "tuple[Floats, Floats]":
        return gaussian.draw_inputs(self, rng, batch_size)

    def draw_tasks(self, rng: "np.random.Generator", count: int) -> "Floats":
        draws = rng.standard_normal((count, 2, self.task_dim), "float32")  # one draw, so that pools are nested
        ranks = draws[:, 1].argsort(1, kind="stable").argsort(1, kind="stable")
        return draws[:, 0] * (ranks < self.num_nonzero)

    def targets(self, xs: "Floats", noise: "Floats", ws: "Floats") -> "Floats":
        return gaussian.linear_targets(self, xs, noise, ws)

    def draw_on_device(self, batch_size: int, pool: "Tensor", generator: "Generator | None") -> "Tree":
        def prior(normal: gaussian.Normal) -> "Tensor":
            ws, keys = normal(batch_size, self.task_dim), normal(batch_size, self.task_dim)
            return ws * (keys.argsort(1).argsort(1) < self.num_nonzero)

        return gaussian.draw_on_device(self, batch_size, pool, generator, prior)

    def predictions(self, xs: "Tensor", ys: "Tensor", pool: "Tensor | None") -> "Mapping[str, Tensor]":
        from icl.core.baselines import dmmse_predictions

        found = {"lasso": lasso_predictions(xs, ys, self.noise_variance), **gaussian.simple_predictions(xs, ys)}
        if "posterior" in self.baselines:
            found = {"posterior": posterior_predictions(xs, ys, self.num_nonzero, self.noise_variance), **found}
        if pool is not None:
            found["dmmse"] = dmmse_predictions(xs, ys, pool, self.noise_variance)
        return found


def _are_few(task_dim: int, num_nonzero: int) -> bool:
    most = math.isqrt(MAX_COVARIANCES)  # of weights; beyond it one support is too large, and counting takes long
    small = num_nonzero <= most and task_dim <= MAX_COVARIANCES
    return small and math.comb(task_dim, num_nonzero) * num_nonzero**2 <= MAX_COVARIANCES


def posterior_predictions(xs: "Tensor", ys: "Tensor", num_nonzero: int, noise_variance: float) -> "Tensor":
    """The Bayes-optimal prediction of each y under s-sparse Gaussian tasks, from the examples before it.

    Each of the C(D, s) supports has a Gaussian posterior over its weights, updated example by example, and the
    probability of the ys before. Work O(B K C(D, s) s^2). Without noise it is the limit sigma^2 -> 0: a variance below
    1e-12 counts as 1e-12, about what float32 targets are rounded by.

    Args:
        xs: (B, K, D). ys: (B, K, 1). num_nonzero: s. noise_variance: sigma^2 >= 0.

    Returns: (B, K, 1) float64.
    """
    import torch

    from icl.core.baselines import BYTE_BUDGET

    supports = torch.tensor(list(combinations(range(xs.shape[-1]), num_nonzero)), device=xs.device)
    rows = max(1, BYTE_BUDGET // (8 * supports.numel() * num_nonzero))
    noise = max(noise_variance, MIN_NOISE_VARIANCE)
    parts = [
        _posterior(x.double(), y.double(), supports, noise)
        for x, y in zip(torch.split(xs, rows), torch.split(ys, rows), strict=True)
    ]
    return torch.cat(parts)


def _posterior(xs: "Tensor", ys: "Tensor", supports: "Tensor", noise_variance: float) -> "Tensor":
    import torch

    batch, examples, _ = xs.shape
    size = supports.shape[1]
    means = xs.new_zeros(batch, *supports.shape)
    covariances = torch.eye(size, dtype=xs.dtype, device=xs.device).repeat(batch, len(supports), 1, 1)
    log_weights = xs.new_zeros(batch, len(supports))
    found = []
    for k in range(examples):
        seen = xs[:, k][:, supports]  # (B, C, s)
        guesses = (seen * means).sum(-1)
        found.append((log_weights.softmax(-1) * guesses).sum(-1, keepdim=True))
        along = (covariances * seen[..., None, :]).sum(-1)
        variances = (along * seen).sum(-1).clamp(min=0) + noise_variance
        errors = ys[:, k] - guesses
        log_weights -= (errors.square() / variances + variances.log()) / 2
        means += along * (errors / variances)[..., None]
        covariances -= along[..., None] * (along / variances[..., None])[..., None, :]
    return torch.stack(found, 1)


def lasso_predictions(xs: "Tensor", ys: "Tensor", noise_variance: float) -> "Tensor":
    """The prediction x_k . w_k of each y with w_k the lasso of the first k examples, and 0 for k = 0.

    w_k lowers |y - X w|^2 / (2 k) + a |w|_1 by 100 sweeps of coordinate descent from 0. The penalty a is
    sigma sqrt(2 log(D) / k), which is above the noise of every weight, and at least 0.01, as without noise.

    Args:
        xs: (B, K, D). ys: (B, K, 1). noise_variance: sigma^2 >= 0.

    Returns: (B, K, 1) float64.
    Source: Tibshirani 1996; Garg et al. 2022 take the best of five penalties, of which 0.01 is one.
    """
    import torch

    from icl.core.baselines import BYTE_BUDGET

    examples, dim = xs.shape[1:]
    rows = max(1, BYTE_BUDGET // (8 * examples * dim * dim))
    parts = [
        _lasso(x.double(), y.double(), noise_variance)
        for x, y in zip(torch.split(xs, rows), torch.split(ys, rows), strict=True)
    ]
    return torch.cat(parts)


def _lasso(xs: "Tensor", ys: "Tensor", noise_variance: float) -> "Tensor":
    import torch

    batch, examples, dim = xs.shape
    grams = xs.new_zeros(batch, examples, dim, dim)  # X'X / k
    grams[:, 1:] = (xs[:, :-1, :, None] * xs[:, :-1, None]).cumsum(1)
    products = torch.zeros_like(xs)  # X'y / k
    products[:, 1:] = (xs[:, :-1] * ys[:, :-1]).cumsum(1)
    counts = torch.arange(examples, dtype=xs.dtype, device=xs.device).clamp(min=1)
    grams /= counts[:, None, None]
    products /= counts[:, None]
    penalties = (counts.reciprocal() * (2 * math.log(dim) * noise_variance)).sqrt().clamp(min=LASSO_PENALTY)
    ws = torch.zeros_like(xs)
    for _ in range(LASSO_SWEEPS):
        for d in range(dim):
            own = grams[..., d, d]
            slopes = products[..., d] - (grams[..., d] * ws).sum(-1) + own * ws[..., d]
            shrunk = slopes.sign() * (slopes.abs() - penalties).clamp(min=0)
            ws[..., d] = torch.where(own > 0, shrunk / own, 0.0)
    return (xs * ws).sum(-1, keepdim=True)
