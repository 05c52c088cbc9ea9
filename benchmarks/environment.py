"""Where a benchmark ran: goes beside every number it prints."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch


def describe_machine() -> dict[str, object]:
    """Processor, cores, threads and versions."""
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return {
        "processor": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("icl", "torch", "numpy")},
    }
