"""Adapters, one device a file, loaded when first asked for. Nothing here falls back to another device."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from icl.core.errors import BackendUnavailableError

if TYPE_CHECKING:  # it needs torch, which a command line that trains nothing does not load
    from icl.core.backend import Backend

_ADAPTERS = {"cpu": "CPUBackend", "cuda": "CUDABackend", "xla": "XLABackend"}
# The kinds of device that a backend runs on, its own first; one that is not here runs on whatever it is given.
_KINDS = {"cpu": ("cpu",), "cuda": ("cuda",), "xla": ("tpu", "cpu")}


def get_backend(name: str, *, matmul_precision: str = "highest", threads: int | None = None) -> "Backend":
    """The backend of that name, ready to run.

    Args:
        matmul_precision: `training.matmul_precision` of the spec; a backend obeys it or refuses.
        threads: `run.threads` of the spec, of PyTorch's kernels on the host; None leaves them to PyTorch.

    Raises: BackendUnavailableError when there is no such backend, its package or device is missing, or it cannot obey.
    """
    require_known(name)
    module = importlib.import_module(f"icl.backends.{name}")
    adapter: Callable[[str, int | None], Backend] = getattr(module, _ADAPTERS[name])
    return adapter(matmul_precision, threads)


def device_kinds(name: str) -> tuple[str, ...] | None:
    """The kinds of device that a backend runs on, its own first, without loading it; None for any kind.

    Raises: BackendUnavailableError when there is no such backend.
    """
    require_known(name)
    return _KINDS.get(name)


def backend_of_kind(kind: str) -> str:
    """The backend whose own kind of device that is."""
    return next(name for name, kinds in _KINDS.items() if kinds[0] == kind)


def require_known(name: str) -> None:
    """Raises BackendUnavailableError when there is no backend of that name, available here or not."""
    if name not in _ADAPTERS:
        known = ", ".join(sorted(_ADAPTERS))
        raise BackendUnavailableError(f"backend: got {name!r}; expected one of {known}. Correct `run.backend`.")


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
