"""Which float32 products a device has, told before the device or any library is looked for."""

from icl.core.errors import BackendUnavailableError


def require_precision_of_cpu(backend: str, matmul_precision: str) -> None:
    """Raises BackendUnavailableError unless a processor multiplies with that `training.matmul_precision`."""
    if matmul_precision != "highest":
        raise BackendUnavailableError(
            f"backend {backend}: got matmul_precision {matmul_precision!r} on the CPU; expected 'highest', whose "
            "result does not depend on the kind of processor. Set `training.matmul_precision` or choose another "
            "backend."
        )
