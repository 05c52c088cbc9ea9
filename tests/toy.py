"""A backend as another package brings it: `run.backend` names it `tests.toy:ToyBackend`, and icl has no line about it.

Its device is the processor. It computes a batch at a time, through `compile`, and knows nothing of chunks.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Generator

from icl.backends.numerics import pinned_numerics
from icl.backends.shapes import BoundShapes, check_chunk
from icl.backends.threads import resolve_threads
from icl.core.backend import Advance, Step, Tree
from icl.core.errors import BackendUnavailableError
from icl.core.step import fold_steps


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
        bound = BoundShapes()

        def compiled(*trees: Tree) -> Tree:
            bound.check(*trees)
            with self._computing():
                return fn(*trees)

        return compiled

    def compile_steps(self, step: Step, *, num_steps: int) -> Advance:
        bound = BoundShapes()

        def advance(state: Tree, batches: Tree, length: int) -> tuple[Tree, Tree]:
            check_chunk(batches, num_steps, length)
            bound.check(state, batches)
            with self._computing():
                return fold_steps(lambda state, batch: step(state, self.to_device(batch)), state, batches, length)

        return advance

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
        with pinned_numerics(threads=self._threads), torch.no_grad():
            yield
