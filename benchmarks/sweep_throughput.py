"""How much faster a sweep is on one-thread workers than its runs one after another on every core.

    python -m benchmarks.sweep_throughput --save

All three train the same runs from nothing, D=4, K=8, in turn, start-up included:
    each alone    `python -m icl.run` for one run after another, a thread on each core
    one process   `icl.train` for one run after another in one process, a thread on each core
    sweep         `python -m icl.sweep`, a worker of one thread on each core
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import add_save_option, describe_machine, print_table, report
from icl.io.codec import encode_spec
from icl.io.sweepfile import load_sweep

ONE_PROCESS = """
import sys
import icl
for file in sys.argv[2:]:
    icl.train(file, store=sys.argv[1])
"""
SIZES: dict[str, dict[str, Any]] = {
    "L2H4, width 32, B=128": {"model": {"embed_dim": 32}, "training": {"batch_size": 128}},
    "L2H4, width 64, B=256": {"model": {"embed_dim": 64}, "training": {"batch_size": 256}},
}


def sweep_data(size: str, runs: int, steps: int) -> dict[str, Any]:
    """A sweep over seeds."""
    base = {
        "task": {"task_dim": 4, "num_examples": 8},
        "model": SIZES[size]["model"],
        "training": {**SIZES[size]["training"], "total_steps": steps},
        "evaluation": {"batch_size": 1024},
        "run": {"checkpoint_at": {"linear": 10}, "evaluate_at": {"linear": 10}, "save_state_every": 100},
    }
    return {"base": base, "grid": {"seeds.init": {"from": 0, "to": runs - 1}}}


def seconds(commands: list[list[str]], environment: Mapping[str, str]) -> float:
    """What commands take, one after another."""
    begun = time.perf_counter()
    for command in commands:
        subprocess.run(
            command,
            check=True,
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return time.perf_counter() - begun


def measure(folder: Path, size: str, runs: int, steps: int, workers: int) -> dict[str, float]:
    """Seconds of each way to train the sweep."""
    (folder / "sweep.json").write_text(json.dumps(sweep_data(size, runs, steps)))
    specs = []
    for member in load_sweep(folder / "sweep.json").members:
        specs.append(str(folder / f"{member.name}.json"))
        Path(specs[-1]).write_bytes(encode_spec(member.spec))
    python, threads = sys.executable, {"OMP_NUM_THREADS": str(workers), "MKL_NUM_THREADS": str(workers)}
    stores = {name: tempfile.mkdtemp(dir=folder) for name in ("each alone", "one process", "sweep")}
    sweep = [python, "-m", "icl.sweep", str(folder / "sweep.json"), "--store", stores["sweep"]]
    return {
        "each alone": seconds(
            [[python, "-m", "icl.run", spec, "--store", stores["each alone"]] for spec in specs], threads
        ),
        "one process": seconds([[python, "-c", ONE_PROCESS, stores["one process"], *specs]], threads),
        "sweep": seconds([[*sweep, "--devices", f"cpu:{workers}"]], {"XDG_STATE_HOME": str(folder)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    add_save_option(parser)
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    for size in SIZES:
        rounds = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                rounds.append(measure(Path(folder), size, options.runs, options.steps, options.workers))
        for way in rounds[0]:
            ratios = [one[way] / one["sweep"] for one in rounds]
            spent = [one[way] for one in rounds]
            table.append({"size": size, "way": way, "seconds": spent, "x sweep": ratios, "median": median(ratios)})
    print(f"{options.runs} runs of {options.steps} steps on {options.workers} cores")
    print_table(table)
    result = {
        "runs": options.runs,
        "steps": options.steps,
        "workers": options.workers,
        "table": table,
        **describe_machine(),
    }
    report("sweep_throughput", result, save=options.save)


if __name__ == "__main__":
    main()
