"""A backend as another package brings it: `run.backend` names it `tests.toy:ToyBackend`, and icl has no line about it.

Its device is the processor.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Generator

from icl.backends.eager import compile_eagerly, compile_steps_eagerly
from icl.backends.numerics import pinned_numerics
from icl.backends.threads import resolve_threads
from icl.core.backend import Advance, Step, Tree
from icl.core.errors import BackendUnavailableError


class ToyBackend:
    """The least that keeps the laws."""

    name = f"{__name__}:ToyBackend"

    def __init__(self, matmul_precision: str = "highest", threads: int | None = None) -> None:
        if matmul_precision != "highest":
            raise BackendUnavailableError(
                f"backend {self.name}: got matmul_precision {matmul_precision!r}; expected 'highest'. Set "
                "`training.matmul_precision`."
            )
        self._threads = resolve_threads(threads)
        self._generator = Generator()
        self._calls = 0.0

    def describe(self) -> dict[str, str]:
        return {"backend": self.name, "torch": str(torch.__version__), "threads": str(self._threads)}

    def to_device(self, tree: Tree) -> Tree:
        with torch.inference_mode(False):
            return {key: leaf.detach().clone(memory_format=torch.contiguous_format) for key, leaf in tree.items()}

    def to_cpu(self, tree: Tree) -> Tree:
        return self.to_device(tree)

    def manual_seed(self, seed: int) -> Generator:
        return self._generator.manual_seed(seed)

    def compile(self, fn: Callable[..., Tree]) -> Callable[..., Tree]:
        return compile_eagerly(fn, self._computing)

    def compile_steps(self, step: Step, *, num_steps: int) -> Advance:
        return compile_steps_eagerly(step, num_steps, self._computing)

    def counters(self) -> dict[str, float]:
        return {"calls": self._calls}

    @contextmanager
    def trace(self, directory: str) -> Iterator[None]:
        before = self._calls
        yield
        Path(directory).mkdir(parents=True, exist_ok=True)
        Path(directory, "trace.json").write_text(json.dumps({"calls": self._calls - before}))

    def synchronize(self) -> None:
        pass

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._calls += 1
        with pinned_numerics(threads=self._threads):
            yield
