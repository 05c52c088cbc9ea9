"""The table of backends; an adapter is loaded when it is first asked for. Nothing here falls back to another device."""

import importlib
import inspect
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import attrs

from icl.backends.kinds import CPU, CUDA, TPU, DeviceKind
from icl.backends.precision import require_precision_of_cpu
from icl.core.errors import BackendUnavailableError

if TYPE_CHECKING:  # it needs torch, which a command line that trains nothing does not load
    from icl.core.backend import Backend

Adapter: TypeAlias = "Callable[[str, int | None], Backend]"
"""Makes a backend ready to run, from `matmul_precision` and `threads` as `get_backend` has them."""

_ELSEWHERE = re.compile(r"\w+(\.\w+)*:\w+")


@attrs.frozen
class Entry:
    """A backend of icl: its adapter, and the kinds of device that it runs on, its own first."""

    adapter: Adapter
    kinds: tuple[DeviceKind, ...]


# The return type of each function has mypy check the adapter against the protocol.
def _cpu(matmul_precision: str, threads: int | None) -> "Backend":
    from icl.backends.cpu import CPUBackend

    return CPUBackend(matmul_precision, threads)


def _cuda(matmul_precision: str, threads: int | None) -> "Backend":
    from icl.backends.cuda import CUDABackend

    return CUDABackend(matmul_precision, threads)


def _xla(matmul_precision: str, threads: int | None) -> "Backend":
    from icl.backends.xla import XLABackend

    return XLABackend(matmul_precision, threads)


BACKENDS = {
    "cpu": Entry(_cpu, (CPU,)),
    "cuda": Entry(_cuda, (CUDA,)),
    "xla": Entry(_xla, (TPU, CPU)),
}


def get_backend(name: str, *, matmul_precision: str = "highest", threads: int | None = None) -> "Backend":
    """The backend of that name, ready to run.

    Args:
        name: one of the table, or `package.module:Class` for an adapter of another package.
        matmul_precision: `training.matmul_precision` of the spec; a backend obeys it or refuses.
        threads: `run.threads` of the spec, of PyTorch's kernels on the host; None leaves them to PyTorch.

    Raises: BackendUnavailableError when there is no such backend, its package or device is missing, or it cannot obey.
    """
    require_known(name)
    adapter = BACKENDS[name].adapter if name in BACKENDS else _import_adapter(name)
    return adapter(matmul_precision, threads)


def kinds_of(name: str) -> tuple[str, ...] | None:
    """The kinds of device that a backend runs on, its own first; None for any kind, as for one of another package.

    Raises: BackendUnavailableError when there is no such backend.
    """
    require_known(name)
    return tuple(kind.name for kind in BACKENDS[name].kinds) if name in BACKENDS else None


def device_kinds() -> dict[str, DeviceKind]:
    """Every kind of device that is a backend's own, by its name."""
    return {entry.kinds[0].name: entry.kinds[0] for entry in BACKENDS.values()}


def backend_of_kind(kind: str) -> str:
    """The backend whose own kind of device that is."""
    return next(name for name, entry in BACKENDS.items() if entry.kinds[0].name == kind)


def require_known(name: str) -> None:
    """Raises BackendUnavailableError when that cannot be the name of a backend; nothing is loaded or looked for."""
    if name not in BACKENDS and not _ELSEWHERE.fullmatch(name):
        known = ", ".join(sorted(BACKENDS))
        raise BackendUnavailableError(
            f"backend: got {name!r}; expected one of {known}, or package.module:Class. Correct `run.backend`."
        )


def require_obeyed(name: str, matmul_precision: str) -> None:
    """Raises BackendUnavailableError when no device here that such a backend runs on could obey the spec.

    Nothing is loaded or looked for: what a backend of another package refuses is not known.
    """
    require_known(name)
    if name in BACKENDS and (BACKENDS[name].kinds == (CPU,) or _is_xla_on_cpu(name)):
        require_precision_of_cpu(name, matmul_precision)


def _is_xla_on_cpu(name: str) -> bool:
    return name == "xla" and os.environ.get("PJRT_DEVICE") == CPU.name.upper()


def available_backends() -> dict[str, str]:
    """Every backend of the table with "available" or the reason why it is not."""
    found = {}
    for name in BACKENDS:
        try:
            get_backend(name)
            found[name] = "available"
        except BackendUnavailableError as error:
            found[name] = str(error)
    return found


def _import_adapter(name: str) -> Adapter:
    from icl.core.backend import Backend

    module, _, adapter = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), adapter)
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"backend {name}: got {error}; expected a module {module} with a class {adapter}. Install its package, set "
            "PYTHONPATH to where it lies, or correct `run.backend`."
        ) from None
    # Whatever a name may lead to: only what was written to be a backend is called.
    methods = {method for method, value in vars(Backend).items() if inspect.isfunction(value) and method[0] != "_"}
    if not inspect.isclass(found) or found is Backend:
        fault = f"{found!r:.100}"
    elif missing := sorted(methods - {*dir(found)}):
        fault = f"a class without {', '.join(missing)}"
    else:
        return cast("Adapter", found)
    raise BackendUnavailableError(
        f"backend {name}: got {fault}; expected a class that keeps `icl.core.backend.Backend`. Correct `run.backend`."
    )
