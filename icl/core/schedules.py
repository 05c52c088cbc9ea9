"""Learning-rate schedules as functions of the step as a tensor: one graph, whatever the step."""

import math

import torch
from torch import Tensor

from icl.core.spec import ScheduleSpec


def learning_rate(schedule: ScheduleSpec, total_steps: int, step: Tensor) -> Tensor:
    """The learning rate of update `step` (0-based), a float32 tensor like `step`.

    one_cycle: linear from eta/d to eta at update w N - 1 and down to eta/d^2 at update N - 1, with d = max(N/2 - 1, 1);
        `torch.optim.lr_scheduler.OneCycleLR` with both div factors N/2 - 1, as the published trainer calls it.
    triangle: linear from 0 to eta at update w N, then to 0 at N (Raventos et al. 2023).
    warmup_cosine: linear from 0 to eta at update w N, then half a cosine to 0 at N (`optax`).
    constant: eta.

    Args:
        schedule: peak eta = `learning_rate`, warm-up fraction w.
        total_steps: N >= 1.
        step: int64, any shape.
    """
    peak, fraction, total = schedule.learning_rate, schedule.warmup_fraction, total_steps
    position = step.to(torch.float32)
    if schedule.name == "constant":
        return torch.full_like(position, peak)
    if schedule.name == "one_cycle":
        low = peak / max(total / 2 - 1, 1.0)
        lowest = low / max(total / 2 - 1, 1.0)
        turn, end = fraction * total - 1, float(total - 1)
        rising = low + (peak - low) * _ramp(position, 0.0, turn)
        return torch.where(position <= turn, rising, peak + (lowest - peak) * _ramp(position, turn, end))
    turn, end = float(round(fraction * total)), float(total)
    down = _ramp(position, turn, end)
    falling = peak * (1 - down) if schedule.name == "triangle" else peak * 0.5 * (1 + torch.cos(math.pi * down))
    return torch.where(position < turn, peak * _ramp(position, 0.0, turn), falling)


def _ramp(position: Tensor, start: float, stop: float) -> Tensor:
    """0 at `start`, 1 at `stop`, linear between; a phase of no length is already over."""
    if stop <= start:
        return torch.ones_like(position)
    return ((position - start) / (stop - start)).clamp(0.0, 1.0)
