"""PyTorch's settings of a process that change what a function computes: made plain while ours run, then put back.

A setting that is plain already is left alone, so that two threads which both find it so do not disturb each other.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from icl.backends.threads import use_threads

_CASTING = ("cpu", "cuda", "xla")  # devices that our functions run on and autocast may lower the precision of
_REDUCED = {"tf32", "bf16"}


@contextmanager
def pinned_numerics(
    matmul_precision: str = "highest", *, threads: int | None = None, deterministic: bool = False
) -> Iterator[None]:
    """Run in float32 on the CPU where nothing else is said, without autocast or inference mode, as the spec asks.

    Args:
        matmul_precision: of float32 products, `training.matmul_precision`.
        threads: that PyTorch's kernels on the host use; None leaves their number alone.
        deterministic: refuse algorithms whose result depends on the order in which threads of a device end.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device in _CASTING:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(_default_dtype())
        stack.enter_context(_deterministic_algorithms(deterministic))
        stack.enter_context(_float32_matmul(matmul_precision))
        if threads is not None:
            stack.enter_context(use_threads(threads))
        yield


@contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    if before == torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic_algorithms(wanted: bool) -> Iterator[None]:
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    if (before, warn_only) == (wanted, False):
        yield
        return
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def _float32_matmul(precision: str) -> Iterator[None]:
    """`torch.set_float32_matmul_precision` and the `fp32_precision` of a kind of device, which PyTorch keeps apart.

    Reading the first raises while the second contradicts it, and setting the first sets the second.
    """
    kinds = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined, unused-ignore]
    before = [kind.fp32_precision for kind in kinds]
    if precision == "highest" and not set(before) & _REDUCED and torch.get_float32_matmul_precision() == precision:
        yield
        return
    for kind in kinds:
        kind.fp32_precision = "ieee"
    older = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older)
        for kind, value in zip(kinds, before, strict=True):
            kind.fp32_precision = "none"  # which takes the setting of all devices
            if kind.fp32_precision != value:
                kind.fp32_precision = value
