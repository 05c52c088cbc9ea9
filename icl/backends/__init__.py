"""Adapters, one device a file, loaded when first asked for. Nothing here falls back to another device."""

import importlib
from collections.abc import Callable

from icl.core.backend import Backend
from icl.core.errors import BackendUnavailableError

_ADAPTERS = {"cpu": "CPUBackend", "cuda": "CUDABackend", "xla": "XLABackend"}


def get_backend(name: str, *, matmul_precision: str = "highest", threads: int | None = None) -> Backend:
    """The backend of that name, ready to run.

    Args:
        matmul_precision: `training.matmul_precision` of the spec; a backend obeys it or refuses.
        threads: `run.threads` of the spec, of PyTorch's kernels on the host; None leaves them to PyTorch.

    Raises: BackendUnavailableError when there is no such backend, its package or device is missing, or it cannot obey.
    """
    if name not in _ADAPTERS:
        known = ", ".join(sorted(_ADAPTERS))
        raise BackendUnavailableError(f"backend: got {name!r}; expected one of {known}. Correct `run.backend`.")
    module = importlib.import_module(f"icl.backends.{name}")
    adapter: Callable[[str, int | None], Backend] = getattr(module, _ADAPTERS[name])
    return adapter(matmul_precision, threads)


def available_backends() -> dict[str, str]:
    """Every known backend with "available" or the reason why it is not."""
    found = {}
    for name in _ADAPTERS:
        try:
            get_backend(name)
            found[name] = "available"
        except BackendUnavailableError as error:
            found[name] = str(error)
    return found
