"""How many threads PyTorch's kernels use on the host: they add in another order on another number."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from icl.core.errors import BackendUnavailableError
from icl.machine import allowed_cores

_parallel_in: list[int] = []  # the process that has used more than one thread
_SAID = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def resolve_threads(asked: int | None) -> int:
    """The number of threads for `run.threads`: what it says; for None, PyTorch's own choice within the allowed cores.

    OMP_NUM_THREADS and MKL_NUM_THREADS are part of PyTorch's choice, and what they say may be more than the cores.

    Raises: BackendUnavailableError when OMP_THREAD_LIMIT gives the process fewer than `asked`, or OpenMP would hang.
    """
    limit = _thread_limit()
    number = asked
    if number is None:
        chosen = torch.get_num_threads()
        number = min(limit, chosen if any(name in os.environ for name in _SAID) else min(chosen, allowed_cores()))
    if number > 1 and _parallel_in not in ([], [os.getpid()]):
        raise BackendUnavailableError(
            f"run.threads: got {number} in a process forked from one that used several; expected 1, since OpenMP's "
            'threads do not survive a fork. Set `run.threads` to 1, or start processes by multiprocessing\'s "spawn".'
        )
    if number > limit:
        raise BackendUnavailableError(
            f"run.threads: got {asked} under OMP_THREAD_LIMIT={limit}; expected at most that many. "
            "Unset OMP_THREAD_LIMIT, or lower `run.threads`."
        )
    return number


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Exactly that many threads inside, also where OMP_DYNAMIC lets OpenMP take fewer on a busy machine."""
    if number > 1:
        _parallel_in[:] = [os.getpid()]
    before, openmp = torch.get_num_threads(), _openmp()
    dynamic = openmp is not None and bool(openmp.omp_get_dynamic())
    if before != number:
        torch.set_num_threads(number)
    if openmp is not None and dynamic:
        openmp.omp_set_dynamic(0)
    try:
        yield
    finally:
        if openmp is not None and dynamic:
            openmp.omp_set_dynamic(1)
        if before != number:
            torch.set_num_threads(before)


def _thread_limit() -> int:
    openmp = _openmp()
    return 2**31 - 1 if openmp is None else int(openmp.omp_get_thread_limit())


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that PyTorch has loaded, None where it has none."""
    loaded = ctypes.CDLL(None)
    return loaded if hasattr(loaded, "omp_get_dynamic") else None
