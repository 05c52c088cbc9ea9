"""What is global in a process: its random generators, and settings that change what PyTorch computes."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


def global_generators() -> tuple[str, ...]:
    """Digests of the states of Python's, NumPy's and PyTorch's global random generators."""
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())
    return tuple(hashlib.sha256(repr(state).encode()).hexdigest() for state in states)


@contextmanager
def hostile_settings(*, older: bool) -> Iterator[None]:
    """Whatever a process or a `with` can set that changes what PyTorch computes, at once; nothing is set before.

    Args:
        older: say the precision of products in the older of two ways, of which PyTorch refuses a mixture.
    """
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, "highest")
        if older:
            torch.set_float32_matmul_precision("medium")
        else:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined, unused-ignore]
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(threads + 1)
        stack.callback(torch.set_default_dtype, torch.float32)
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        for setting in (torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
            stack.enter_context(setting)
        yield


def process_settings() -> dict[str, object]:
    """What `hostile_settings` sets, as it is now."""
    try:
        older: object = torch.get_float32_matmul_precision()
    except RuntimeError:  # set in the newer way
        older = "mixed"
    return {
        "cuda": torch.backends.cuda.matmul.fp32_precision,
        "mkldnn": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined, unused-ignore]
        "older": older,
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "device": torch.empty(0).device,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "inference": torch.is_inference_mode_enabled(),
        "gradients": torch.is_grad_enabled(),
    }
