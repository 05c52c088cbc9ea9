"""The cost of the ideal predictors: dMMSE over task pools of every size, ridge, and the choice of their byte budget.

    python -m benchmarks.baselines [--largest 20] [--save]

Each pool is measured in a fresh process, whose peak resident memory less that before the call is what it needs.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.environment import add_save_option, describe_machine, print_table, report
from icl.core import baselines
from icl.core.families.linear import LinearTask
from icl.core.spec import EvaluationSpec, Spec, TrainingSpec
from icl.core.tasks import sample_evaluation_batch, sample_task_pool

BUDGETS = [2**power for power in range(17, 26, 2)]


def setting(log2_tasks: int, batch_size: int) -> Spec:
    """D = 8, K = 16, sigma^2 = 0.25, as in Raventos et al. 2023."""
    return Spec(
        task=LinearTask(task_dim=8, num_examples=16, num_tasks=2**log2_tasks, noise_variance=0.25),
        training=TrainingSpec(total_steps=1),
        evaluation=EvaluationSpec(batch_size=batch_size),
    )


def measure_pool(log2_tasks: int, batch_size: int) -> dict[str, Any]:
    """Seconds and memory of one dMMSE evaluation in this process."""
    spec = setting(log2_tasks, batch_size)
    pool = sample_task_pool(spec)
    assert pool is not None
    batch = sample_evaluation_batch(spec, "pretrain", pool)
    baselines.dmmse_predictions(batch["xs"][:2], batch["ys"][:2], pool[:2], 0.25)  # loads what is loaded on first use
    before = _forget_peak()
    start = perf_counter()
    predictions = baselines.dmmse_predictions(batch["xs"], batch["ys"], pool, 0.25)
    elapsed = perf_counter() - start
    return {
        "log2_tasks": log2_tasks,
        "seconds": elapsed,
        "pool_mib": pool.numel() * 4 / 2**20,
        "peak_above_mib": _resident_mib("VmHWM") - before,
        "mse": float((predictions - batch["ys"]).square().mean()),
    }


def _resident_mib(name: str) -> float:
    """Resident memory of this process, now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def _forget_peak() -> float:
    """Begin a new peak, since importing PyTorch leaves a high one; returns what is resident now, in MiB. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_mib("VmRSS")


def in_a_fresh_process(log2_tasks: int, batch_size: int, threads: int) -> dict[str, Any]:
    """`measure_pool` there."""
    command = [sys.executable, "-m", "benchmarks.baselines", "--batch-size", str(batch_size), "--threads", str(threads)]
    done = subprocess.run([*command, "--pool", str(log2_tasks)], stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def measure_budgets(log2_tasks: int, batch_size: int) -> list[dict[str, Any]]:
    """Seconds of both predictors for each byte budget, best of three in turn."""
    spec = setting(log2_tasks, batch_size)
    pool = sample_task_pool(spec)
    assert pool is not None
    batch = sample_evaluation_batch(spec, "pretrain", pool)
    rows = [{"budget": budget, "dmmse_seconds": float("inf"), "ridge_seconds": float("inf")} for budget in BUDGETS]
    chosen = baselines.BYTE_BUDGET
    for _ in range(3):
        for row in rows:
            baselines.BYTE_BUDGET = int(row["budget"])
            start = perf_counter()
            baselines.dmmse_predictions(batch["xs"], batch["ys"], pool, 0.25)
            middle = perf_counter()
            baselines.ridge_predictions(batch["xs"], batch["ys"], 0.25)
            row["dmmse_seconds"] = min(row["dmmse_seconds"], middle - start)
            row["ridge_seconds"] = min(row["ridge_seconds"], perf_counter() - middle)
    baselines.BYTE_BUDGET = chosen
    return [{**row, "chosen": row["budget"] == chosen} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=20, help="log2 of the largest pool")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pool", type=int, help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.pool is not None:
        print(json.dumps(measure_pool(options.pool, options.batch_size)))
        return
    budgets = measure_budgets(min(14, options.largest), options.batch_size)
    print_table(budgets)
    pools = [in_a_fresh_process(power, options.batch_size, options.threads) for power in range(options.largest + 1)]
    print_table(pools)
    result = {"budgets": budgets, "pools": pools, "batch_size": options.batch_size, **describe_machine()}
    report("baselines", result, save=options.save)


if __name__ == "__main__":
    main()
