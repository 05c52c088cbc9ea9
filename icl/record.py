"""The record of an attempt: what is known of it at its start, and why it failed."""

import os
import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import version

from icl import __version__
from icl.core.backend import Backend
from icl.core.spec import Spec
from icl.io.codec import spec_to_data
from icl.io.errors import StoreError
from icl.io.mirror import describe_wandb
from icl.io.names import run_name
from icl.io.owner import Ownership
from icl.io.rundir import RunDir
from icl.machine import allowed_cores, processor

_RECORDED = (  # beginnings of variables that place a computation, change it or slow it down
    *("ATEN_", "CUBLAS_", "CUDA_", "DNNL_", "GOMP_", "ICL_", "KMP_", "LIBTPU_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PJRT_", "PYTORCH_", "TORCH_", "TPU_", "XLA_"),
)


@contextmanager
def failure_recorded(run: RunDir, attempt: str, ownership: Ownership) -> Iterator[None]:
    """Have the manifest say why an attempt failed, where the store still takes it.

    One that another process has taken over says nothing, as one that was cut off: the run goes on there.
    """
    try:
        yield
    except Exception as error:
        if ownership.is_taken_over():
            raise
        with suppress(StoreError):
            run.manifest.record_end(attempt, {"status": "failed", "error": f"{type(error).__name__}: {error}"})
        raise


def describe_attempt(spec: Spec, backend: Backend, start: int) -> dict[str, object]:
    """What an attempt that goes on from step `start` says of itself, its machine and its spec's run half."""
    packages = ("torch", "numpy", "safetensors", "fsspec")
    return {
        "from_step": start,
        "started": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": allowed_cores(),
        "command": sys.argv,
        "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith(_RECORDED)},
        "versions": {"icl": __version__, **{package: version(package) for package in packages}},
        "backend": backend.describe(),
        "run": spec_to_data(spec)["run"],
        "wandb": describe_wandb(spec, run_name(spec)),
    }
