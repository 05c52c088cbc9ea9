"""StrictBackend: the CPU backend as the strictest of devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from icl.backends.cpu import CPUBackend
from icl.core.backend import Advance, Step, Tree
from icl.testing.settings import global_generators

_HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


class StrictBackend(CPUBackend):
    """The CPU backend as the strictest device: consumed state is poisoned, and what a real device forbids is refused.

    `host_reads` counts reads of values (`.item()`, `.tolist()`, branching on a tensor) inside compiled functions.
    """

    def __init__(self, matmul_precision: str = "highest", threads: int | None = None) -> None:
        super().__init__(matmul_precision, threads)
        self.host_reads = 0

    def compile(self, fn: Callable[..., Tree]) -> Callable[..., Tree]:
        compiled = super().compile(fn)

        def strict(*trees: Tree) -> Tree:
            with self._watched():
                return compiled(*trees)

        return strict

    def compile_steps(self, step: Step, *, num_steps: int) -> Advance:
        advance = super().compile_steps(step, num_steps=num_steps)

        def strict(state: Tree, batches: Tree, length: int) -> tuple[Tree, Tree]:
            for leaf in batches.values():
                leaf[length:] = float("nan")
            with self._watched():
                new, metrics = advance(state, batches, length)
            for key, leaf in state.items():
                if any(leaf.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for out in new.values()):
                    raise AssertionError(f"compiled steps: the new state shares memory with the consumed {key!r}")
                leaf.fill_(float("nan") if leaf.is_floating_point() else -(2**31))
            return new, metrics

        return strict

    @contextmanager
    def _watched(self) -> Iterator[None]:
        before = global_generators()
        with _CountHostReads() as counter:  # type: ignore[no-untyped-call]
            yield
        self.host_reads += counter.count
        if global_generators() != before:
            raise AssertionError("compiled function: a global random generator was used")


class _CountHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _HOST_READS
        return func(*args, **(kwargs or {}))
