"""How the numbers that are measured are named, and the training loss.

Every metric is a mean over sequences (`icl.core.measurements` says of what): `.../token/k` at position k (after k
examples), and without suffix the mean over the K positions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from icl.core.family import TaskFamily

TRAINING_LOSS = "train/loss"


def squared_error(ys_pred: Tensor, ys: Tensor) -> Tensor:
    """Mean squared error over sequences and positions: the training loss, a scalar (Raventos et al. 2023, eq. 1)."""
    return (ys_pred - ys).square().mean()


def name_metrics(evaluation_set: str, name: str, values: Tensor) -> dict[str, float]:
    """Scalars by name, e.g. "pretrain/delta_ridge" and "pretrain/delta_ridge/token/3", from (K,) means on the CPU."""
    row = values.to(torch.float64)
    by_position = {f"{evaluation_set}/{name}/token/{k}": float(value) for k, value in enumerate(row)}
    return {f"{evaluation_set}/{name}": float(row.mean()), **by_position}


def with_limits(task: TaskFamily, values: Mapping[str, float]) -> dict[str, float]:
    """`values` and those of the baselines that equal another one, such as `delta_dmmse` under a Gaussian task prior.

    Law: idempotent, so that it completes stored values, of which the older ones lack it.
    """
    limits = {
        name.replace(f"/delta_{other}", f"/delta_{baseline}"): value
        for baseline, other in task.equal_baselines.items()
        for name, value in values.items()
        if f"/delta_{other}" in name
    }
    return {**values, **limits}
