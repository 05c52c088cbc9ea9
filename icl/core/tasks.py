"""Task pools and batches of any task family: pure functions of (experiment, step)."""

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Generator, Tensor

from icl.core.backend import Tree
from icl.core.family import TaskFamily
from icl.core.seeds import derive_generator, derive_key
from icl.core.spec import Experiment

EVALUATION_SETS = ("pretrain", "true")
_POOL_BLOCK = 1024  # tasks drawn from one key; changing it changes every pool


def sample_task_pool(experiment: Experiment) -> Tensor | None:
    """The M pretraining task vectors, or None when tasks are drawn afresh from the prior (`num_tasks` null).

    Task i depends on (`seeds.tasks`, i) only, so the pool for M is a prefix of the pool for any larger M.

    Returns: (M, task_size) float32 on the CPU.
    Source: Carroll et al. 2025 (nested pools); Raventos et al. 2023 draw a new pool for each M.
    """
    num_tasks = experiment.task.num_tasks
    if num_tasks is None:
        return None
    blocks = [
        experiment.task.draw_tasks(derive_generator(experiment.seeds.tasks, "tasks", block), _POOL_BLOCK)
        for block in range(math.ceil(num_tasks / _POOL_BLOCK))
    ]
    return torch.from_numpy(np.concatenate(blocks)[:num_tasks].copy())


def sample_batch(experiment: Experiment, step: int, pool: Tensor | None) -> Tree:
    """The training batch of update `step` (0-based), the same bits on every backend and machine.

    Args:
        pool: `sample_task_pool(experiment)`.

    Returns: xs (B, K, D) and ys (B, K, 1), float32 on the CPU: what training reads.
    """
    batch = sample_training_batch(experiment, step, pool)
    del batch["ws"]
    return batch


def sample_training_batch(experiment: Experiment, step: int, pool: Tensor | None) -> Tree:
    """`sample_batch` and the task of each of its sequences, ws (B, task_size)."""
    rng = derive_generator(experiment.seeds.sampling, "train", step)
    return _sample(rng, experiment.task, experiment.training.batch_size, pool)


def sample_batches(
    experiment: Experiment, steps: Iterable[int], pool: Tensor | None, num_rows: int | None = None
) -> Tree:
    """`sample_batch` of each step, stacked: xs (N, B, K, D) and ys (N, B, K, 1).

    Args:
        num_rows: N, if more than the steps; the rows after them are zero.
    """
    batches = [sample_batch(experiment, step, pool) for step in steps]
    padding = {key: torch.zeros_like(leaf) for key, leaf in batches[0].items()}
    batches += [padding] * ((num_rows or len(batches)) - len(batches))
    return {key: torch.stack([batch[key] for batch in batches]) for key in padding}


def sample_evaluation_batch(experiment: Experiment, evaluation_set: str, pool: Tensor | None) -> Tree:
    """The fixed evaluation batch of one set: "pretrain" (tasks as in training) or "true" (tasks from the prior).

    Returns: xs (B, K, D), ys (B, K, 1) and ws (B, task_size) with B = `evaluation.batch_size`, float32 on the CPU.
    Raises: ValueError for an unknown set.
    """
    if evaluation_set not in EVALUATION_SETS:
        raise ValueError(f"evaluation set: got {evaluation_set!r}; expected one of {', '.join(EVALUATION_SETS)}.")
    rng = derive_generator(experiment.seeds.evaluation, "eval", evaluation_set)
    tasks = pool if evaluation_set == "pretrain" else None
    return _sample(rng, experiment.task, experiment.evaluation.batch_size, tasks)


def sample_batch_on_device(experiment: Experiment, pool: Tensor, generator: Generator | None) -> Tree:
    """A training batch drawn by the device's own generator (`"sampling": "device"`), seeded by the caller.

    The same bits only on the same backend and version. Shapes as `sample_batch`.

    Args:
        pool: (M, task_size) on the device; not looked at when `num_tasks` is null.
    """
    return experiment.task.draw_on_device(experiment.training.batch_size, pool, generator)


def training_seed(experiment: Experiment, step: int) -> int:
    """The 63-bit seed of update `step` for device sampling, from the same stream as host sampling."""
    return derive_key(experiment.seeds.sampling, "train", step)[0] >> 1


def _sample(rng: np.random.Generator, task: TaskFamily, batch: int, pool: Tensor | None) -> Tree:
    xs, noise = task.draw_inputs(rng, batch)
    ws = task.draw_tasks(rng, batch) if pool is None else pool.numpy()[rng.integers(pool.shape[0], size=batch)]
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite shows in the loss, which says so
        ys = task.targets(xs, noise, ws)
    return {"xs": torch.from_numpy(xs), "ys": torch.from_numpy(ys[..., None]), "ws": torch.from_numpy(ws)}
