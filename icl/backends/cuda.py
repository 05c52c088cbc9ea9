"""The CUDA backend: eager PyTorch with deterministic algorithms; nothing inside a chunk waits for the host."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Generator
from torch.profiler import ProfilerActivity

from icl.backends.eager import compile_eagerly, compile_steps_eagerly, trace_eagerly
from icl.backends.kernels import kernels_digest
from icl.backends.numerics import pinned_numerics
from icl.backends.threads import resolve_threads
from icl.core.backend import Advance, Step, Tree
from icl.core.errors import BackendUnavailableError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


class CUDABackend:
    """The current CUDA device. Its bits depend on what `describe()` names."""

    name = "cuda"

    def __init__(self, matmul_precision: str = "highest", threads: int | None = None) -> None:
        if torch.version.cuda is None:
            raise BackendUnavailableError(
                f"backend cuda: got torch {torch.__version__} without CUDA; expected a CUDA build. "
                "Install one, or use another backend (`icl.available_backends()` lists them)."
            )
        if not torch.cuda.is_available():
            raise BackendUnavailableError(
                "backend cuda: got no usable GPU; expected one visible to `nvidia-smi`. Check the driver and "
                "CUDA_VISIBLE_DEVICES, or use another backend (`icl.available_backends()` lists them)."
            )
        workspace = os.environ.setdefault(_WORKSPACE, _DETERMINISTIC_WORKSPACES[0])
        if workspace not in _DETERMINISTIC_WORKSPACES:
            raise BackendUnavailableError(
                f"backend cuda: got {_WORKSPACE}={workspace}; expected one of {', '.join(_DETERMINISTIC_WORKSPACES)}, "
                "without which cuBLAS is not deterministic. Unset it."
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._matmul_precision = matmul_precision
        threads = resolve_threads(threads)  # of what runs on the host
        self._pinned = partial(pinned_numerics, matmul_precision, threads=threads, deterministic=True)
        self._generator = Generator(self._device)

    def describe(self) -> dict[str, str]:
        with self._pinned():
            kernels = kernels_digest(self, f"{self._device} {self._matmul_precision}")
        return {
            "backend": self.name,
            "torch": str(torch.__version__),
            "device": torch.cuda.get_device_name(self._device),
            "capability": "{}.{}".format(*torch.cuda.get_device_capability(self._device)),
            "cuda": str(torch.version.cuda),
            "kernels": kernels,
            "matmul_precision": self._matmul_precision,
        }

    def to_device(self, tree: Tree) -> Tree:
        with torch.inference_mode(False):  # or a caller's inference mode would make tensors that cannot be trained
            return {key: leaf.detach().pin_memory().to(self._device, non_blocking=True) for key, leaf in tree.items()}

    def to_cpu(self, tree: Tree) -> Tree:
        fetched = {key: leaf.detach().to("cpu", non_blocking=True, copy=True) for key, leaf in tree.items()}
        torch.cuda.synchronize(self._device)
        return fetched

    def manual_seed(self, seed: int) -> Generator:
        return self._generator.manual_seed(seed)

    def compile(self, fn: Callable[..., Tree]) -> Callable[..., Tree]:
        return compile_eagerly(fn, self._pinned)

    def compile_steps(self, step: Step, *, num_steps: int) -> Advance:
        return compile_steps_eagerly(step, num_steps, self._pinned)

    def counters(self) -> dict[str, float]:
        return {}

    def trace(self, directory: str) -> AbstractContextManager[None]:
        return trace_eagerly(directory, [ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
