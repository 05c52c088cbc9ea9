"""What an evaluation measures: each with its name and unit, when it is due and what predictions are compared with.

The standard ones are squared gaps in units of y^2, **not** divided by D. Hoogland et al. 2024 report these; Raventos et
al. 2023 (eq. 4) divide by D.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import attrs
from torch import Tensor

from icl.core.family import TaskFamily

TARGETS = "targets"
"""The name of the ys among what predictions are compared with; the others are the family's baselines."""

Compare: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`compare(ys_pred, references, weights)`: sums over sequences, (R, K), from (B, K, 1), (R, B, K) and (B,).

A weight is 1 for a sequence that counts and 0 for padding. It is pure and reads no value on the host.
"""


def squared_gaps(ys_pred: Tensor, references: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over sequences of the squared gap to each reference, at each position: a `Compare`."""
    return ((ys_pred[None, ..., 0] - references).square() * weights[None, :, None]).sum(1)


def always(step: int) -> bool:
    """Due at every evaluation."""
    return True


@attrs.frozen
class Measurement:
    """One number a position, and its mean over positions, of each evaluation set.

    Attributes:
        name: as it follows the set's in a metric's name.
        unit: of the number.
        needs: what predictions are compared with: `TARGETS` or a baseline's name.
        compare: how; measurements that share it are computed at once.
        is_due: whether it is measured at an evaluation after so many updates; a function of the step alone, so that
            interruptions do not change what is there.
    """

    name: str
    unit: str
    needs: str
    compare: Compare = squared_gaps
    is_due: Callable[[int], bool] = always


def standard_measurements(task: TaskFamily) -> tuple[Measurement, ...]:
    """The mean squared error, and the gap to each baseline of the family."""
    gaps = (Measurement(f"delta_{name}", "y^2", name) for name in task.baselines)
    return (Measurement("mse", "y^2", TARGETS), *gaps)


def grouped(measurements: Iterable[Measurement]) -> list[list[Measurement]]:
    """The measurements that are compared alike and due together, each group in the order given."""
    groups: dict[object, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault((measurement.compare, measurement.is_due), []).append(measurement)
    return list(groups.values())
