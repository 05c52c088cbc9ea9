"""Functions shared by the eager adapters: PyTorch runs each operation as Python reaches it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from icl.core.backend import Step, Tree
from icl.core.step import fold_steps

Signature = dict[str, tuple[tuple[int, ...], torch.dtype]]


def signature(tree: Tree) -> Signature:
    """Shape and dtype of every leaf."""
    return {key: (tuple(leaf.shape), leaf.dtype) for key, leaf in tree.items()}


@contextmanager
def pinned_numerics(matmul_precision: str) -> Iterator[None]:
    """Run with the spec's float32 matmul precision and autograd off, whatever the process has set; put it back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(matmul_precision)
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def compile_eagerly(fn: Callable[..., Tree], matmul_precision: str) -> Callable[..., Tree]:
    """`fn` without autograd, bound to the shapes of its first call."""
    bound: list[list[Signature]] = []

    def compiled(*trees: Tree) -> Tree:
        given = [signature(tree) for tree in trees]
        if not bound:
            bound.append(given)
        _require(given == bound[0], "compiled function", given, bound[0])
        with pinned_numerics(matmul_precision):
            return fn(*trees)

    return compiled


def compile_steps_eagerly(
    step: Step, num_steps: int, matmul_precision: str
) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
    """`fold_steps` of `step`, bound to `num_steps` and to the shapes of the first call."""
    bound: list[list[Signature]] = []

    def advance(state: Tree, batches: Tree) -> tuple[Tree, Tree]:
        given = [signature(state), signature(batches)]
        if not bound:
            _require(
                all(leaf.shape[0] == num_steps for leaf in batches.values()), "compiled steps", given[1], num_steps
            )
            bound.append(given)
        _require(given == bound[0], "compiled steps", given, bound[0])
        # A clone starts on an aligned address, so that no kernel's choice depends on where in a chunk a step lies.
        with pinned_numerics(matmul_precision):
            return fold_steps(
                lambda state, batch: step(state, {k: v.clone() for k, v in batch.items()}), state, batches
            )

    return advance


def _require(condition: bool, where: str, got: object, expected: object) -> None:
    if not condition:
        raise ValueError(f"{where}: got {got}; expected {expected}. Compile again for other shapes.")
