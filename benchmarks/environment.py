"""Where a benchmark ran, and how it prints and keeps what it found."""

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import torch

from icl import __version__

RESULTS = Path(__file__).parent / "results"


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
        "versions": {"icl": __version__, **{package: version(package) for package in ("torch", "numpy")}},
    }


def add_save_option(parser: argparse.ArgumentParser) -> None:
    """`--save`, for `report`."""
    parser.add_argument("--save", action="store_true", help=f"also write the JSON line into {RESULTS.name}/")


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of equal keys, aligned; floats to four significant digits."""

    def shown(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return ", ".join(map(shown, value))
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    table = [list(rows[0]), *([shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(flush=True)


def report(name: str, result: Mapping[str, Any], *, save: bool) -> None:
    """Print the result as one JSON line; with `save`, keep it as results/NAME.json."""
    line = orjson.dumps({"benchmark": name, **result}, option=orjson.OPT_SORT_KEYS)
    print(line.decode(), flush=True)
    if save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name}.json"
        path.write_bytes(orjson.dumps(orjson.loads(line), option=orjson.OPT_INDENT_2) + b"\n")
