"""The shapes a compiled function is bound to: every adapter refuses others instead of compiling again in silence."""

import torch

from icl.core.backend import Tree

Signature = dict[str, tuple[tuple[int, ...], torch.dtype]]


def signature(tree: Tree) -> Signature:
    """Shape and dtype of every leaf."""
    return {key: (tuple(leaf.shape), leaf.dtype) for key, leaf in tree.items()}


class BoundShapes:
    """The shapes and dtypes of a compiled function's first call."""

    def __init__(self) -> None:
        self._first: list[Signature] = []

    def check(self, *trees: Tree) -> None:
        """Bind to the first trees given. Raises ValueError for others later."""
        given = [signature(tree) for tree in trees]
        self._first = self._first or given
        if given != self._first:
            raise ValueError(f"compiled function: got {given}; expected {self._first}. Compile again for other shapes.")


def check_chunk(batches: Tree, num_steps: int, length: int) -> None:
    """Raise ValueError unless the batches have `num_steps` rows, of which `length` are to be used."""
    rows = sorted({leaf.shape[0] for leaf in batches.values()})
    if rows != [num_steps] or not 1 <= length <= num_steps:
        raise ValueError(
            f"compiled steps: got {length} of {rows} batches; expected 1 to {num_steps} of {num_steps}. "
            "Pad the batches, or compile again for another number of steps."
        )
