"""The Backend protocol: where and how fast a pure function runs, never what it computes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
from torch import Generator, Tensor

Tree: TypeAlias = dict[str, Tensor]
"""The only structure that crosses a backend: a flat mapping from names to tensors."""

Step: TypeAlias = Callable[[Tree, Tree], tuple[Tree, Tree]]
"""`step(state, batch) -> (state, metrics)`: one pure update; metrics are scalars."""

Advance: TypeAlias = Callable[[Tree, Tree, int], tuple[Tree, Tree]]
"""`advance(state, batches, length) -> (state, metrics)`: a compiled fold of steps, see `Backend.compile_steps`."""


def identical(one: Tree, other: Tree) -> bool:
    """Whether two CPU trees have the same names, dtypes, shapes and bits (NaN equal to itself, 0.0 not to -0.0)."""
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype
        and one[key].shape == other[key].shape
        and one[key].contiguous().view(-1).view(torch.uint8).equal(other[key].contiguous().view(-1).view(torch.uint8))
        for key in one
    )


def description_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What two descriptions of a backend say differently, as in "threads 2 -> 1", in the order of the names.

    What only one of them names does not count: it was not described yet, or is no longer.
    """
    return [f"{key} {then[key]} -> {now[key]}" for key in sorted(then.keys() & now.keys()) if then[key] != now[key]]


class Backend(Protocol):
    """A place to run pure functions of trees.

    Laws (`icl.testing.BackendContract` has a test for each):
        1. `compile_steps(step, num_steps=N)` equals `fold_steps`: bitwise on cpu, to a stated tolerance elsewhere.
        2. The bits of a run do not depend on how it is cut into chunks.
        3. `to_cpu(to_device(tree))` is bit-exact and shares no memory with `tree`.
        4. A compiled function called with other shapes or dtypes raises; it never recompiles silently.
        5. Results belong to the caller: no later call changes them. `compile_steps` consumes the state it is given.
        6. No global random generator is read or written.
        7. No setting of the process (autocast, a default device or dtype, precision, ...) changes a bit or is changed.
        8. Nothing that watches (`counters`, `trace`, `synchronize`) changes a bit; counters only grow.
    """

    @property
    def name(self) -> str:
        """What `run.backend` calls it: a name of the table, or `package.module:Class`."""
        ...

    def describe(self) -> dict[str, str]:
        """Everything that may change the bits of a run here: device, package versions, threads, kernels, precision."""
        ...

    def to_device(self, tree: Tree) -> Tree:
        """A copy of a CPU tree on the device."""
        ...

    def to_cpu(self, tree: Tree) -> Tree:
        """A copy of a device tree in CPU memory, in one transfer where the device allows it."""
        ...

    def manual_seed(self, seed: int) -> Generator | None:
        """Make the device's draws a function of `seed`; returns what to pass as `generator=` (None: the device's own).

        Args:
            seed: 0 <= seed < 2**63.

        Returns: the same object every time, so that a compiled function may hold it.
        """
        ...

    def compile(self, fn: Callable[..., Tree]) -> Callable[..., Tree]:
        """`fn` of trees as one graph for one set of shapes."""
        ...

    def compile_steps(self, step: Step, *, num_steps: int) -> Advance:
        """The left fold of `step` over up to `num_steps` batches, as one program that serves every length.

        Returns:
            `advance(state, batches, length) -> (state, metrics)`, the fold over the first `length` batches. Every leaf
            of `batches` and `metrics` has a leading axis of `num_steps`, whatever the length: the rows from `length`
            on are not looked at in `batches` and are zero in `metrics`. The state passed in is consumed.
        """
        ...

    def counters(self) -> dict[str, float]:
        """What the device has done in this process so far: programs compiled, transfers, ...; empty if nothing counts.

        Names end in their unit, `_seconds` or `_bytes`, when they are not counts.
        """
        ...

    def trace(self, directory: str) -> AbstractContextManager[object]:
        """Record what runs inside, as files in a local directory that TensorBoard or Perfetto opens."""
        ...

    def synchronize(self) -> None:
        """Return when all work handed to the device is done (before reading a clock)."""
        ...
