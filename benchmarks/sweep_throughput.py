"""How much faster a sweep is on one-thread workers than its runs one after another on every core.

    python -m benchmarks.sweep_throughput --save

Both train the same 8 runs (L2H4, width 64, D=4, K=8, B=256) from nothing. The runs one after another share one process
with a thread on each core; the sweep's time includes starting its workers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import add_save_option, describe_machine, report

ONE_AFTER_ANOTHER = """
import sys
import icl
from icl.io.sweepfile import load_sweep
for member in load_sweep(sys.argv[1]).members:
    icl.train(member.spec, store=sys.argv[2])
"""


def write_sweep(folder: Path, runs: int, steps: int) -> Path:
    """A sweep over seeds."""
    base: dict[str, Any] = {
        "task": {"task_dim": 4, "num_examples": 8},
        "training": {"total_steps": steps},
        "evaluation": {"batch_size": 1024},
        "run": {"checkpoint_at": {"linear": 10}, "evaluate_at": {"linear": 10}, "save_state_every": 100},
    }
    file = folder / "sweep.json"
    file.write_text(json.dumps({"base": base, "grid": {"seeds.init": {"from": 0, "to": runs - 1}}}))
    return file


def measure(command: list[str], threads: int | None, state: Path) -> float:
    """Seconds that a command takes."""
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    begun = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=2)
    add_save_option(parser)
    options = parser.parse_args()
    alone, together = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = write_sweep(folder, options.runs, options.steps)
        for number in range(options.rounds):
            store = str(folder / f"alone-{number}")
            alone.append(measure([sys.executable, "-c", ONE_AFTER_ANOTHER, str(file), store], options.workers, folder))
            sweep = [sys.executable, "-m", "icl.sweep", str(file), "--store", str(folder / f"together-{number}")]
            together.append(measure([*sweep, "--devices", f"cpu:{options.workers}"], None, folder))
    ratios = [one / other for one, other in zip(alone, together, strict=True)]
    print(f"{options.runs} runs of {options.steps} steps; seconds of each round")
    print(f"{'one after another':20} {options.workers} threads            " + " ".join(f"{s:7.1f}" for s in alone))
    print(f"{'sweep':20} {options.workers} workers, 1 thread  " + " ".join(f"{s:7.1f}" for s in together))
    print(f"{'throughput':41} " + " ".join(f"{ratio:6.2f}x" for ratio in ratios))
    result = {
        "runs": options.runs,
        "steps": options.steps,
        "workers": options.workers,
        "one_after_another_seconds": alone,
        "sweep_seconds": together,
        "ratios": ratios,
        **describe_machine(),
    }
    report("sweep_throughput", result, save=options.save)


if __name__ == "__main__":
    main()
