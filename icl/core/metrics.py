"""What is measured from predictions, and how the numbers are named.

Every metric is a mean over sequences of squared differences, in units of y^2, **not** divided by D: `.../token/k` at
position k (after k examples), and without suffix the mean over the K positions. Hoogland et al. 2024 report these;
Raventos et al. 2023 (eq. 4) divide both by D.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

TRAINING_LOSS = "train/loss"


def squared_error(ys_pred: Tensor, ys: Tensor) -> Tensor:
    """Mean squared error over sequences and positions: the training loss, a scalar (Raventos et al. 2023, eq. 1)."""
    return (ys_pred - ys).square().mean()


def squared_gaps(ys_pred: Tensor, references: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over sequences of the squared gap to each reference, at each position.

    Args:
        ys_pred: (B, K, 1). references: (R, B, K). weights: (B,), 1 for a sequence that counts, 0 for padding.

    Returns: (R, K).
    """
    return ((ys_pred[None, ..., 0] - references).square() * weights[None, :, None]).sum(1)


def reference_names(num_tasks: int | None) -> tuple[str, ...]:
    """The metrics of one evaluation set that are computed; under a Gaussian task prior dMMSE is ridge."""
    return ("mse", "delta_ridge") if num_tasks is None else ("mse", "delta_ridge", "delta_dmmse")


def name_metrics(evaluation_set: str, names: tuple[str, ...], values: Tensor) -> dict[str, float]:
    """Scalars by name, e.g. "pretrain/delta_ridge" and "pretrain/delta_ridge/token/3", from (R, K) means on the CPU."""
    rows = {}
    for name, row in zip(names, values.to(torch.float64), strict=True):
        rows[f"{evaluation_set}/{name}"] = float(row.mean())
        rows |= {f"{evaluation_set}/{name}/token/{k}": float(value) for k, value in enumerate(row)}
    return rows


def with_limits(num_tasks: int | None, values: Mapping[str, float]) -> dict[str, float]:
    """`values` and, under a Gaussian task prior, `delta_dmmse`: `delta_ridge`, since dMMSE tends to ridge as M grows.

    Law: idempotent, so that it completes stored values, of which the older ones lack it.
    """
    if num_tasks is not None:
        return dict(values)
    limits = {
        name.replace("/delta_ridge", "/delta_dmmse"): value for name, value in values.items() if "/delta_ridge" in name
    }
    return {**values, **limits}
