"""The XLA backend: TPUs, and the CPU through PJRT. A compiled function ends in the only barriers there are."""

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch

from icl.backends.numerics import pinned_numerics
from icl.backends.precision import require_precision_of_cpu
from icl.backends.shapes import BoundShapes, check_chunk
from icl.backends.threads import resolve_threads
from icl.core.backend import Advance, Step, Tree
from icl.core.errors import BackendUnavailableError
from icl.machine import processor

_COUNTED = (  # our name, that of torch_xla's metric, and None to count it or the unit of its total
    ("compilations", "CompileTime", None),
    ("compile_seconds", "CompileTime", 1e-9),
    ("executions", "ExecuteTime", None),
    ("transfers_to_device", "TransferToDeviceTime", None),
    ("transfers_to_device_seconds", "TransferToDeviceTime", 1e-9),
    ("transfers_to_device_bytes", "OutboundData", 1.0),
    ("transfers_from_device", "TransferFromDeviceTime", None),
    ("transfers_from_device_seconds", "TransferFromDeviceTime", 1e-9),
    ("transfers_from_device_bytes", "InboundData", 1.0),
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that change what programs compute
_PRECISION = {"highest": "highest", "high": "high", "medium": "default"}


class XLABackend:
    """One XLA device of this process: a TPU chip, or the host's processor with PJRT_DEVICE=CPU."""

    name = "xla"

    def __init__(self, matmul_precision: str = "highest", threads: int | None = None) -> None:
        torch_xla, self._kind = _import_for_device()
        if self._kind == "CPU":
            require_precision_of_cpu(self.name, matmul_precision)
        # It advises against changing the precision; here every program is traced under its own and keeps it.
        logging.getLogger("torch_xla.backends").setLevel(logging.ERROR)
        self._matmul_precision = matmul_precision
        self._threads = resolve_threads(threads)  # of what runs on the host
        if self._kind == "TPU":
            _initialize_cache(matmul_precision)
        self._device = _open_device(torch_xla, self._kind)
        self._lengths: dict[int, torch.Tensor] = {}

    def describe(self) -> dict[str, str]:
        import torch_xla.runtime as xr

        described = {
            "backend": self.name,
            "torch": str(torch.__version__),
            "torch_xla": version("torch_xla"),
            "device": self._kind,
            "matmul_precision": self._matmul_precision,
            "flags": " ".join(filter(None, map(os.environ.get, _FLAGS))).strip(),
        }
        if self._kind == "CPU":  # its kernels are compiled for this processor and divide their work among its cores
            described["processor"] = processor()
            described["cores"] = str(len(os.sched_getaffinity(0)))
            return described
        attributes = xr.global_runtime_device_attributes()[0]
        described |= {"device_kind": str(attributes.get("device_kind", "unknown")), "libtpu": version("libtpu")}
        return described

    def to_device(self, tree: Tree) -> Tree:
        import torch_xla.core.xla_model as xm

        with torch.inference_mode(False):
            sent: Tree = xm.send_cpu_data_to_device({k: v.detach().contiguous() for k, v in tree.items()}, self._device)
        return sent

    def to_cpu(self, tree: Tree) -> Tree:
        from icl.backends.xla_program import fetch

        with torch.inference_mode(False):
            fetched = fetch([leaf.detach() for leaf in tree.values()])
        return dict(zip(tree, fetched, strict=True))

    def manual_seed(self, seed: int) -> None:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(seed, str(self._device))

    def compile(self, fn: Callable[..., Tree]) -> Callable[..., Tree]:
        from icl.backends.xla_program import barrier

        bound = BoundShapes()

        def compiled(*trees: Tree) -> Tree:
            bound.check(*trees)
            with self._tracing():
                result = fn(*trees)
                barrier(result.values())
            return result

        return compiled

    def compile_steps(self, step: Step, *, num_steps: int) -> Advance:
        from icl.backends.xla_program import FoldProgram, barrier

        bound, built = BoundShapes(), list[FoldProgram]()

        def advance(state: Tree, batches: Tree, length: int) -> tuple[Tree, Tree]:
            check_chunk(batches, num_steps, length)
            bound.check(state, batches)
            with self._tracing():
                if length not in self._lengths:
                    self._lengths[length] = self.to_device({"length": torch.tensor(length)})["length"]
                if not built:
                    built.append(FoldProgram(step, state, batches, self._device))
                new, metrics = built[0](state, batches, self._lengths[length])
                barrier([*new.values(), *metrics.values()])
            return new, metrics

        return advance

    def counters(self) -> dict[str, float]:
        from torch_xla.debug import metrics

        found: dict[str, float] = {}
        for name, metric, unit in _COUNTED:
            count, total = (metrics.metric_data(metric) or (0, 0.0))[:2]
            found[name] = float(count) if unit is None else total * unit
        fallbacks = metrics.executed_fallback_ops()
        reads = "aten::_local_scalar_dense"
        found["cpu_fallbacks"] = float(sum(metrics.counter_value(name) for name in fallbacks if name != reads))
        found["scalar_reads"] = float(metrics.counter_value(reads) or 0)
        return found

    @contextmanager
    def trace(self, directory: str) -> Iterator[None]:
        from torch_xla.debug import profiler

        profiler.start_trace(directory)
        try:
            yield
            self.synchronize()
        finally:
            profiler.stop_trace()

    def synchronize(self) -> None:
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()  # nothing is pending between compiled functions, only queued

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """The spec's precision and no autograd, whatever the process has set."""
        from torch_xla.backends import get_mat_mul_precision, set_mat_mul_precision

        if get_mat_mul_precision() != _PRECISION[self._matmul_precision]:
            set_mat_mul_precision(_PRECISION[self._matmul_precision])
        with pinned_numerics(threads=self._threads), torch.no_grad():
            yield


def _import_for_device() -> tuple[Any, str]:
    """torch_xla and TPU or CPU, from PJRT_DEVICE; unset means the TPU, where torch_xla itself would take the CPU."""
    asked = os.environ.get("PJRT_DEVICE")
    kind = asked or "TPU"
    if kind not in ("TPU", "CPU"):
        raise BackendUnavailableError(
            f'backend xla: got PJRT_DEVICE={kind}; expected TPU or CPU. Correct it; GPUs are `run.backend` "cuda".'
        )
    os.environ["PJRT_DEVICE"] = kind  # before the import, which reads it
    try:
        torch_xla = _import_torch_xla()
        if kind == "TPU":
            _require_tpu()
    except BackendUnavailableError:
        if asked is None:
            del os.environ["PJRT_DEVICE"]
        raise
    return torch_xla, kind


def _import_torch_xla() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch_xla
            import torch_xla.backends
            import torch_xla.core.xla_model
            import torch_xla.runtime
    except ImportError as error:
        try:
            found = f"torch_xla {version('torch_xla')} beside torch {torch.__version__} ({error})"
        except PackageNotFoundError:
            found = "no torch_xla"
        raise BackendUnavailableError(
            f"backend xla: got {found}; expected torch_xla 2.9.0 beside torch 2.9. In the clone: pip install -e "
            "'.[tpu]' on a TPU VM (Python 3.10 to 3.12), '.[xla]' elsewhere (Linux x86_64 only)."
        ) from None
    return torch_xla


def _require_tpu() -> None:
    from torch_xla._internal import tpu

    if tpu.num_available_chips() == 0:
        raise BackendUnavailableError(
            "backend xla: got no TPU chip on this machine; expected one. Run on a TPU VM, or set PJRT_DEVICE=CPU to "
            "run the XLA backend on the processor."
        )
    wanted = [line for line in requires("torch_xla") or [] if line.startswith("libtpu")]
    needed = wanted[0].split(";")[0].strip() if wanted else "libtpu"
    found = f"libtpu=={_version_of('libtpu')}"
    if "==" in needed and found != needed:
        raise BackendUnavailableError(
            f"backend xla: got {found}; expected {needed}, which torch_xla {version('torch_xla')} was built for. "
            "In the clone: pip install -e '.[tpu]' (Python 3.10 to 3.12)."
        )


def cache_folder(matmul_precision: str) -> Path:
    """Where compiled programs are kept: another folder for everything that a program may depend on."""
    packages = ("torch", "torch_xla", "libtpu")
    flags = [f"{name}={os.environ.get(name, '')}" for name in _FLAGS]
    key = "\n".join([*(f"{package}=={_version_of(package)}" for package in packages), *flags, matmul_precision])
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "icl" / "xla" / hashlib.sha256(key.encode()).hexdigest()[:16]


def _initialize_cache(matmul_precision: str) -> None:
    """Once a process; on the CPU compiled programs are written but cannot be read back, so it is for TPUs."""
    import torch_xla.runtime as xr

    try:
        folder = cache_folder(matmul_precision)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be written
        logging.getLogger("icl").warning("programs are compiled anew every time: no place to keep them (%s)", error)
        return
    with suppress(AssertionError):  # another backend of this process has done it
        xr.initialize_cache(str(folder), readonly=False)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _open_device(torch_xla: Any, kind: str) -> torch.device:
    try:
        device: torch.device = torch_xla.device()
        torch_xla.real_devices()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if "in use" in str(error) or "lockfile" in str(error):
            raise BackendUnavailableError(
                f"backend xla: got a TPU that another process holds ({reason}); expected a free chip. End that "
                f"process, or give each its own chip with TPU_VISIBLE_CHIPS. Lock files: {_lock_files()}."
            ) from None
        raise BackendUnavailableError(
            f"backend xla: got no {kind} device ({reason}); expected one that opens. See docs/tpu.md."
        ) from None
    return device


def _lock_files() -> str:
    return ", ".join(map(str, Path("/tmp").glob("libtpu_lockfile*"))) or "none"
