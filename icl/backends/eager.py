"""Functions shared by the eager adapters: PyTorch runs each operation as Python reaches it."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from icl.backends.shapes import BoundShapes, check_chunk
from icl.core.backend import Advance, Step, Tree
from icl.core.step import fold_steps

Pinned: TypeAlias = Callable[[], AbstractContextManager[None]]
"""The settings that a backend's functions run under: `icl.backends.numerics.pinned_numerics` with its own."""


@contextmanager
def trace_eagerly(directory: str, activities: Iterable[ProfilerActivity]) -> Iterator[None]:
    """Record what runs inside as `trace.json` for Perfetto or chrome://tracing."""
    with profile(activities=activities) as recorded:
        yield
    os.makedirs(directory, exist_ok=True)
    recorded.export_chrome_trace(os.path.join(directory, "trace.json"))


def compile_eagerly(fn: Callable[..., Tree], pinned: Pinned) -> Callable[..., Tree]:
    """`fn` without autograd, bound to the shapes of its first call."""
    bound = BoundShapes()

    def compiled(*trees: Tree) -> Tree:
        bound.check(*trees)
        with pinned(), torch.no_grad():
            return fn(*trees)

    return compiled


def compile_steps_eagerly(step: Step, num_steps: int, pinned: Pinned) -> Advance:
    """`fold_steps` of `step`, bound to `num_steps` and to the shapes of the first call."""
    bound = BoundShapes()

    def advance(state: Tree, batches: Tree, length: int) -> tuple[Tree, Tree]:
        check_chunk(batches, num_steps, length)
        bound.check(state, batches)
        # A clone starts on an aligned address, so that no kernel's choice depends on where in a chunk a step lies.
        with pinned(), torch.no_grad():
            return fold_steps(
                lambda state, batch: step(state, {k: v.clone() for k, v in batch.items()}), state, batches, length
            )

    return advance
