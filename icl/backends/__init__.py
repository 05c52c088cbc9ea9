"""Adapters, one device a file, loaded when first asked for. Nothing here falls back to another device."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from icl.core.errors import BackendUnavailableError

if TYPE_CHECKING:  # it imports torch, which a name alone does not need
    from icl.core.backend import Backend

_ADAPTERS = {"cpu": "CPUBackend", "cuda": "CUDABackend", "xla": "XLABackend"}


def get_backend(name: str, *, matmul_precision: str = "highest") -> "Backend":
    """The backend of that name, ready to run.

    Args:
        matmul_precision: `training.matmul_precision` of the spec; a backend obeys it or refuses.

    Raises: BackendUnavailableError when there is no such backend, its package or device is missing, or it cannot obey.
    """
    require_known(name)
    module = importlib.import_module(f"icl.backends.{name}")
    adapter: Callable[[str], Backend] = getattr(module, _ADAPTERS[name])
    return adapter(matmul_precision)


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
