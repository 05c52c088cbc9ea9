"""The CPU backend: the reference and the default."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Generator
from torch.profiler import ProfilerActivity

from icl.backends.eager import compile_eagerly, compile_steps_eagerly, trace_eagerly
from icl.core.backend import Advance, Step, Tree
from icl.core.errors import BackendUnavailableError


class CPUBackend:
    """Eager PyTorch on the CPU. Its bits depend on what `describe()` names, the number of threads among it."""

    name = "cpu"

    def __init__(self, matmul_precision: str = "highest") -> None:
        if matmul_precision != "highest":
            raise BackendUnavailableError(
                f"backend cpu: got matmul_precision {matmul_precision!r}; expected 'highest', whose result does not "
                "depend on the kind of processor. Set `training.matmul_precision` or choose another backend."
            )
        self._matmul_precision = matmul_precision
        self._generator = Generator()

    def describe(self) -> dict[str, str]:
        return {
            "backend": self.name,
            "torch": str(torch.__version__),
            "threads": str(torch.get_num_threads()),
            "instructions": torch.backends.cpu.get_cpu_capability(),
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
        return compile_eagerly(fn, self._matmul_precision)

    def compile_steps(self, step: Step, *, num_steps: int) -> Advance:
        return compile_steps_eagerly(step, num_steps, self._matmul_precision)

    def counters(self) -> dict[str, float]:
        return {}

    def trace(self, directory: str) -> AbstractContextManager[None]:
        return trace_eagerly(directory, [ProfilerActivity.CPU])

    def synchronize(self) -> None:
        pass
