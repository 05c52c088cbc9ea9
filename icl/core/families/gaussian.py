"""What families with x ~ N(0, I_D) and Gaussian label noise share: draws, linear targets and simple baselines."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from icl.core.family import TaskFamily

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor

    from icl.core.backend import Tree
    from icl.core.family import Floats

Normal: TypeAlias = "Callable[..., Tensor]"
"""`normal(*shape)`: draws of N(0, 1) on a device, float32."""

SIMPLE_BASELINES = ("least_squares", "averaging", "nearest_neighbours")
"""Predictors that know nothing of the tasks (Garg et al. 2022); `simple_predictions` computes them."""


def draw_inputs(task: TaskFamily, rng: "np.random.Generator", batch_size: int) -> "tuple[Floats, Floats]":
    """xs (B, K, D) and the noise (B, K), all N(0, 1)."""
    xs = rng.standard_normal((batch_size, task.num_examples, task.task_dim), "float32")
    return xs, rng.standard_normal((batch_size, task.num_examples), "float32")


def linear_targets(task: TaskFamily, xs: "Floats", noise: "Floats", ws: "Floats") -> "Floats":
    """(B, K): x.w for every x, plus noise of variance `noise_variance`. ws is (B, D)."""
    ys = noise * math.sqrt(task.noise_variance)
    for d in range(task.task_dim):  # not `@`: a fixed order of additions gives the same bits under any BLAS
        ys += xs[:, :, d] * ws[:, None, d]
    return ys


def linear_outputs(xs: "Tensor", ws: "Tensor") -> "Tensor":
    """(B, K): x.w for every x, on the device of the inputs."""
    return (xs * ws[:, None]).sum(-1)


def draw_on_device(
    task: TaskFamily,
    batch_size: int,
    pool: "Tensor",
    generator: "Generator | None",
    prior: "Callable[[Normal], Tensor]",
    outputs: "Callable[[Tensor, Tensor], Tensor]" = linear_outputs,
) -> "Tree":
    """What `TaskFamily.draw_on_device` returns, drawn in the order inputs, noise, tasks.

    Args:
        prior: `prior(normal)` is tasks (B, task_size) of the prior, made of such draws.
        outputs: the ys (B, K) without noise of xs (B, K, D) and tasks (B, task_size).
    """
    import torch

    def normal(*shape: int) -> "Tensor":
        return torch.randn(*shape, generator=generator, device=pool.device, dtype=torch.float32)

    xs = normal(batch_size, task.num_examples, task.task_dim)
    noise = normal(batch_size, task.num_examples)
    if task.num_tasks is None:
        ws = prior(normal)
    else:
        ws = pool[torch.randint(pool.shape[0], (batch_size,), generator=generator, device=pool.device)]
    ys = outputs(xs, ws) + noise * math.sqrt(task.noise_variance)
    return {"xs": xs, "ys": ys[..., None]}


def simple_predictions(xs: "Tensor", ys: "Tensor") -> "Mapping[str, Tensor]":
    """What each of `SIMPLE_BASELINES` predicts, (B, K, 1) float64; least squares is ridge without noise."""
    from icl.core.baselines import averaging_predictions, nearest_neighbours_predictions, ridge_predictions

    found = (
        ridge_predictions(xs, ys, 0.0),
        averaging_predictions(xs, ys),
        nearest_neighbours_predictions(xs, ys),
    )
    return dict(zip(SIMPLE_BASELINES, found, strict=True))
