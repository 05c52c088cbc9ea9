"""Predictors that a model is compared with: ridge regression, posteriors over a pool of tasks, and simple ones.

All work in float64 in bounded memory, whatever the batch or the number of tasks.
"""

import math
from collections.abc import Callable
from numbers import Real

import torch
from torch import Tensor

from icl.core.sequences import require_sequences

BYTE_BUDGET = 1 << 21  # of one float64 temporary; benchmarks/baselines.py measures the choice


def ridge_predictions(xs: Tensor, ys: Tensor, noise_variance: float) -> Tensor:
    """The Bayes-optimal prediction of each y under w ~ N(0, I), from the examples before it.

    Prediction k is x_k . w_k with w_k = (X'X + sigma^2 I)^-1 X'y over the first k examples, and 0 for k = 0. It is
    computed from the singular values of X, so sigma^2 -> 0 tends to the least-norm solution, which sigma^2 = 0 is.

    Args:
        xs: (B, K, D). ys: (B, K, 1). noise_variance: sigma^2 >= 0.

    Returns: (B, K, 1) float64.
    Raises: ValueError for other shapes, which would broadcast, another noise, or inputs that require gradients.
    Source: Raventos et al. 2023, eq. 3.
    """
    _require("ridge_predictions", xs, ys, noise_variance)
    batch, examples, dim = xs.shape
    if not examples or not dim:
        return torch.zeros_like(ys, dtype=torch.float64)
    rows = max(1, BYTE_BUDGET // (8 * examples * examples * dim))
    parts = [
        _ridge(x.double(), y.double(), noise_variance)
        for x, y in zip(torch.split(xs, rows), torch.split(ys, rows), strict=True)
    ]
    return torch.cat(parts) if batch else ys.double()


def _require(where: str, xs: Tensor, ys: Tensor, noise_variance: float) -> None:
    require_sequences(where, xs, ys)
    if xs.requires_grad or ys.requires_grad:
        raise ValueError(
            f"{where}: got inputs that require gradients; expected none, since it has no derivative here. "
            "Pass xs.detach() and ys.detach()."
        )
    if not isinstance(noise_variance, Real) or not 0 <= noise_variance < math.inf:
        raise ValueError(f"{where}: got noise_variance {noise_variance!r}; expected a finite number >= 0. Correct it.")


def _ridge(xs: Tensor, ys: Tensor, noise_variance: float) -> Tensor:
    examples = xs.shape[1]
    seen = torch.ones(examples, examples, dtype=xs.dtype, device=xs.device).tril(-1)  # [k, i]: k has seen example i
    contexts = seen[:, :, None] * xs[:, None]  # (B, K, K, D): row k holds the first k examples, then zeros
    left, singular, right = torch.linalg.svd(contexts, full_matrices=False)
    negligible = singular <= singular.amax(-1, keepdim=True) * max(contexts.shape[-2:]) * torch.finfo(xs.dtype).eps
    denominator = singular.square() + noise_variance
    gain = torch.where(negligible, 0.0, singular / torch.where(negligible, 1.0, denominator))
    coordinates = gain * (left.transpose(-1, -2) @ ys[:, None])[..., 0]
    ws_hat = (right.transpose(-1, -2) @ coordinates[..., None])[..., 0]
    predictions: Tensor = (xs * ws_hat).sum(-1, keepdim=True)
    return predictions


def dmmse_predictions(xs: Tensor, ys: Tensor, pool: Tensor, noise_variance: float) -> Tensor:
    """The Bayes-optimal prediction of each y under a uniform prior over the M tasks of `pool`.

    Prediction k is x_k . w_k with w_k the mean of the tasks weighted by softmax(-|y - X w|^2 / (2 sigma^2)) over the
    first k examples; the plain mean for k = 0. sigma^2 = 0 is the limit: the tasks that fit best, equally. Streams over
    tasks with a running maximum, so nothing under- or overflows and memory does not grow with M; work O(B K M D).

    Args:
        xs: (B, K, D). ys: (B, K, 1). pool: (M, D), M >= 1. noise_variance: sigma^2 >= 0.

    Returns: (B, K, 1) float64.
    Raises: ValueError as `ridge_predictions`, and for another pool.
    Source: Raventos et al. 2023, eq. 2.
    """
    _require("dmmse_predictions", xs, ys, noise_variance)
    if not isinstance(pool, Tensor) or pool.ndim != 2 or not len(pool) or pool.shape[1] != xs.shape[-1]:
        found = tuple(pool.shape) if isinstance(pool, Tensor) else type(pool).__name__
        raise ValueError(
            f"dmmse_predictions: got a pool {found}; expected (M, D) with M >= 1 and D = {xs.shape[-1]}. "
            "`run.task_pool()` has it; with infinite M dMMSE is ridge: call ridge_predictions."
        )
    tasks_at_once = min(pool.shape[0], 4096)
    rows = max(1, BYTE_BUDGET // (8 * tasks_at_once))
    parts = [
        _dmmse(x.double(), y.double(), pool.double(), noise_variance, tasks_at_once)
        for x, y in zip(torch.split(xs, rows), torch.split(ys, rows), strict=True)
    ]
    return torch.cat(parts) if xs.shape[0] else ys.double()


def _dmmse(xs: Tensor, ys: Tensor, pool: Tensor, noise_variance: float, tasks_at_once: int) -> Tensor:
    batch, examples, dim = xs.shape
    best = xs.new_full((examples, batch, 1), math.inf)  # least squared error of any task so far, per position
    sums = xs.new_zeros(examples, batch, dim + 1)  # of the weighted tasks, and of the weights
    for tasks in torch.split(pool, tasks_at_once):
        tasks_and_one = torch.nn.functional.pad(tasks, (0, 1), value=1.0)
        errors = xs.new_zeros(batch, tasks.shape[0])
        for k in range(examples):
            new_best = torch.minimum(best[k], errors.amin(-1, keepdim=True))
            weights = _likelihood(errors - new_best, noise_variance)
            decay = _likelihood(best[k] - new_best, noise_variance)
            sums[k] = torch.addmm(sums[k] * decay, weights, tasks_and_one)
            best[k] = new_best
            residuals = torch.addmm(ys[:, k], xs[:, k], tasks.T, beta=-1)
            errors.addcmul_(residuals, residuals)
    ws_hat = sums[..., :-1] / sums[..., -1:]
    return (xs * ws_hat.transpose(0, 1)).sum(-1, keepdim=True)


def _likelihood(excess: Tensor, noise_variance: float) -> Tensor:
    """exp(-excess / (2 sigma^2)) of squared errors above the least one, in place; its limit at sigma^2 = 0."""
    if noise_variance == 0:
        return (excess == 0).to(excess.dtype)
    return excess.div_(-2 * noise_variance).exp_()


def pool_predictions(
    xs: Tensor,
    ys: Tensor,
    pool: Tensor,
    noise_variance: float,
    outputs: Callable[[Tensor, Tensor], Tensor],
    numbers: int,
) -> Tensor:
    """`dmmse_predictions` for functions that are not linear: the mean of f_w(x_k) under the posterior over the pool.

    Law: for outputs x.w it is `dmmse_predictions` up to rounding. Work is M outputs for each x.

    Args:
        xs: (B, K, D). ys: (B, K, 1). pool: (M, task_size). noise_variance: sigma^2 >= 0.
        outputs: f_w(x), (B, m), of one x a sequence (B, D) and of m tasks (m, task_size).
        numbers: what `outputs` holds for one x and one task.

    Returns: (B, K, 1) float64.
    """
    _require("pool_predictions", xs, ys, noise_variance)
    tasks_at_once = min(pool.shape[0], 64)
    rows = max(1, BYTE_BUDGET // (8 * tasks_at_once * numbers))
    parts = [
        _pool_mean(x.double(), y.double(), pool.double(), noise_variance, outputs, tasks_at_once)
        for x, y in zip(torch.split(xs, rows), torch.split(ys, rows), strict=True)
    ]
    return torch.cat(parts) if xs.shape[0] else ys.double()


def _pool_mean(
    xs: Tensor,
    ys: Tensor,
    pool: Tensor,
    noise_variance: float,
    outputs: Callable[[Tensor, Tensor], Tensor],
    tasks_at_once: int,
) -> Tensor:
    batch, examples, _ = xs.shape
    best = xs.new_full((examples, batch, 1), math.inf)  # as in `_dmmse`
    sums = xs.new_zeros(examples, batch, 2)  # of the weighted outputs, and of the weights
    for tasks in torch.split(pool, tasks_at_once):
        errors = xs.new_zeros(batch, tasks.shape[0])
        for k in range(examples):
            new_best = torch.minimum(best[k], errors.amin(-1, keepdim=True))
            weights = _likelihood(errors - new_best, noise_variance)
            decay = _likelihood(best[k] - new_best, noise_variance)
            found = outputs(xs[:, k], tasks)
            sums[k] = sums[k] * decay + torch.stack([(weights * found).sum(-1), weights.sum(-1)], -1)
            best[k] = new_best
            errors += (ys[:, k] - found).square()
    return (sums[..., :1] / sums[..., 1:]).transpose(0, 1)


def averaging_predictions(xs: Tensor, ys: Tensor) -> Tensor:
    """The prediction x_k . w_k of each y with w_k = X'y / k over the first k examples, and 0 for k = 0.

    Args:
        xs: (B, K, D). ys: (B, K, 1).

    Returns: (B, K, 1) float64.
    Raises: ValueError as `ridge_predictions`.
    Source: Garg et al. 2022.
    """
    _require("averaging_predictions", xs, ys, 0.0)
    products = xs.double() * ys.double()
    sums = products.cumsum(1) - products
    counts = torch.arange(xs.shape[1], dtype=sums.dtype, device=sums.device).clamp(min=1)
    return (xs * sums / counts[:, None]).sum(-1, keepdim=True)


def nearest_neighbours_predictions(xs: Tensor, ys: Tensor, num_neighbours: int = 3) -> Tensor:
    """The mean y of the examples before x_k that are nearest to it, of all where there are fewer, and 0 for k = 0.

    Args:
        xs: (B, K, D). ys: (B, K, 1).

    Returns: (B, K, 1) float64.
    Raises: ValueError as `ridge_predictions`.
    Source: Garg et al. 2022, who take 3 neighbours.
    """
    _require("nearest_neighbours_predictions", xs, ys, 0.0)
    batch, examples, _ = xs.shape
    rows = max(1, BYTE_BUDGET // (8 * max(1, examples) ** 2))
    parts = [
        _nearest_mean(x.double(), y.double(), min(num_neighbours, examples))
        for x, y in zip(torch.split(xs, rows), torch.split(ys, rows), strict=True)
    ]
    return torch.cat(parts) if batch else ys.double()


def _nearest_mean(xs: Tensor, ys: Tensor, num_neighbours: int) -> Tensor:
    examples = xs.shape[1]
    later = torch.ones(examples, examples, dtype=torch.bool, device=xs.device).triu()
    distances = torch.cdist(xs, xs, compute_mode="donot_use_mm_for_euclid_dist").masked_fill(later, math.inf)
    nearest, places = distances.topk(num_neighbours, largest=False)
    weights = (nearest < math.inf).to(ys.dtype)
    found = ys[..., 0][:, None].expand(-1, examples, -1).gather(2, places)
    return ((weights * found).sum(-1) / weights.sum(-1).clamp(min=1))[..., None]
