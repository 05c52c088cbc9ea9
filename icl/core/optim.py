"""Adam and learning-rate schedules as functions of tensors: one graph, whatever the step."""

import math

import torch
from torch import Tensor

from icl.core.spec import OptimizerSpec, ScheduleSpec


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


def clip_by_global_norm(grads: Tensor, max_norm: float) -> Tensor:
    """`grads` scaled so that their 2-norm is at most `max_norm`; the same object's values when it already is.

    Source: `torch.nn.utils.clip_grad_norm_` (with its 1e-6 in the denominator).
    """
    norm = grads.square().sum(-1, keepdim=True).sqrt()
    return grads * (max_norm / (norm + 1e-6)).clamp(max=1.0)


def adam_update(
    optimizer: OptimizerSpec, params: Tensor, grads: Tensor, mu: Tensor, nu: Tensor, step: Tensor, lr: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One Adam step with decoupled weight decay.

    Tracks `torch.optim.Adam` (`AdamW` with `weight_decay`, on every parameter) and `optax.adam` up to rounding.

    Args:
        params, grads, mu, nu: (..., P) float32; mu and nu are the first and second moments, zero at step 0.
        step: (...) int64, updates done so far.
        lr: (...) float32.

    Returns: new (params, mu, nu).
    Source: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019 for the decay.
    """
    beta1, beta2 = optimizer.betas
    if optimizer.max_grad_norm is not None:
        grads = clip_by_global_norm(grads, optimizer.max_grad_norm)
    mu = mu * beta1 + grads * (1 - beta1)
    nu = nu * beta2 + grads.square() * (1 - beta2)
    count, lr = (step + 1).to(torch.float32)[..., None], lr[..., None]
    update = (mu / _bias_correction(beta1, count)) / ((nu / _bias_correction(beta2, count)).sqrt() + optimizer.eps)
    if optimizer.weight_decay:
        params = params - lr * optimizer.weight_decay * params
    return params - lr * update, mu, nu


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    """1 - beta**count, accurate for beta near 1 because the power is never rounded to 1."""
    return -torch.expm1(count * (math.log(beta) if beta > 0 else -math.inf))
