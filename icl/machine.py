"""What this machine is and lets the process use: cores and memory, as affinity, containers and batch systems say."""

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SPIN_COUNT = "5000"
"""Rounds that an OpenMP thread spins before it sleeps: measured in docs/performance.md."""

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_PROCESSORS = Path("/proc/cpuinfo")
_KIND = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")  # on x86, then on ARM
_INSTRUCTIONS = {"flags", "Features"}
_ARITHMETIC = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "fp", "asimd", "sve", "sme", "bf16", "i8mm")


def allowed_cores() -> int:
    """How many cores may be busy at once, at least 1: the least of the machine's, the affinity's and the quota."""
    with suppress(AttributeError):  # where the system has no affinity
        return max(1, min(len(os.sched_getaffinity(0)), *_quotas()))
    return max(1, min(os.cpu_count() or 1, *_quotas()))


def allowed_memory() -> int | None:
    """Bytes of memory that the process may hold, the machine's or its control group's; None where that is unknown."""
    limits = [int(text) for text in _settings("memory", "memory.max", "memory.limit_in_bytes") if text.isdecimal()]
    with suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min((limit for limit in limits if limit > 0), default=None)


def processor() -> str:
    """The kind of processor: vendor, family, model, and a digest of the arithmetic instructions it has."""
    said: dict[str, str] = {}
    with suppress(OSError):
        for line in _PROCESSORS.read_text().partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            said[name.strip()] = value.strip()
    if not said.keys() & _INSTRUCTIONS:  # not Linux, or a kind that it tells less of
        return platform.processor() or platform.machine()
    kind = " ".join(said[name] for name in _KIND if name in said)
    listed = " ".join(said[name] for name in sorted(said.keys() & _INSTRUCTIONS)).split()
    arithmetic = sorted(name for name in listed if name.startswith(_ARITHMETIC))  # others tell of the kernel as well
    return f"{kind} {hashlib.sha256(' '.join(arithmetic).encode()).hexdigest()[:8]}"


def limit_spinning() -> None:
    """Have OpenMP's threads spin briefly while they wait for each other and then sleep; by default they spin for long.

    Spinning costs much beside other processes, and sleeping at once costs half the speed of a quiet machine. It counts
    in a process that has not loaded PyTorch yet, and where the user has set neither variable.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def _quotas() -> list[int]:
    """Whole cores of every processor quota that the process is under; a part of a core counts as one."""
    found = [1 << 30]
    for text in _settings("cpu", "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            found.append(-(-int(quota) // int(period)))
    quotas, periods = (list(_settings("cpu", "", name)) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    found += [-(-int(quota) // int(period)) for quota, period in zip(quotas, periods, strict=False) if int(quota) > 0]
    return found


def _settings(controller: str, unified: str, legacy: str = "") -> Iterator[str]:
    """What one file says in the control groups of this process, from its own to the root; version 2, else 1."""
    with suppress(OSError, ValueError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, name = _CGROUPS, unified
            elif controller in controllers.split(","):
                base, name = _CGROUPS / controller, legacy
            else:
                continue
            if not name:
                continue
            # In a container the path is that of the host, and only the part below the mount is there.
            folder = base / path.lstrip("/")
            for place in (folder, *folder.parents):
                with suppress(OSError):
                    yield (place / name).read_text().strip()
                if place == base:
                    break
