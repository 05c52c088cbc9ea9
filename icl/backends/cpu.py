"""The CPU backend: the reference and the default."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Generator
from torch.profiler import ProfilerActivity

from icl.backends.eager import compile_eagerly, compile_steps_eagerly, trace_eagerly
from icl.backends.kernels import kernels_digest
from icl.backends.numerics import pinned_numerics
from icl.backends.precision import require_precision_of_cpu
from icl.backends.threads import resolve_threads
from icl.core.backend import Advance, Step, Tree


class CPUBackend:
    """Eager PyTorch on the CPU. Its bits depend on what `describe()` names, the number of threads among it."""

    name = "cpu"

    def __init__(self, matmul_precision: str = "highest", threads: int | None = None) -> None:
        require_precision_of_cpu(self.name, matmul_precision)
        self._matmul_precision = matmul_precision
        self._threads = resolve_threads(threads)
        self._pinned = partial(pinned_numerics, matmul_precision, threads=self._threads)
        self._generator = Generator()

    def describe(self) -> dict[str, str]:
        with self._pinned():
            kernels = kernels_digest(self, f"{self._threads} threads")
        return {
            "backend": self.name,
            "torch": str(torch.__version__),
            "threads": str(self._threads),
            "kernels": kernels,
            "matmul_precision": self._matmul_precision,
        }

    def to_device(self, tree: Tree) -> Tree:
        with torch.inference_mode(False):  # or a caller's inference mode would make tensors that cannot be trained
            return {key: leaf.detach().clone(memory_format=torch.contiguous_format) for key, leaf in tree.items()}

    def to_cpu(self, tree: Tree) -> Tree:
        return self.to_device(tree)

    def manual_seed(self, seed: int) -> Generator:
        return self._generator.manual_seed(seed)

    def compile(self, fn: Callable[..., Tree]) -> Callable[..., Tree]:
        return compile_eagerly(fn, self._pinned)

    def compile_steps(self, step: Step, *, num_steps: int) -> Advance:
        return compile_steps_eagerly(step, num_steps, self._pinned)

    def counters(self) -> dict[str, float]:
        return {}

    def trace(self, directory: str) -> AbstractContextManager[None]:
        return trace_eagerly(directory, [ProfilerActivity.CPU])

    def synchronize(self) -> None:
        pass
