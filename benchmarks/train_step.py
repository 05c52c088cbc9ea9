"""Our training step beside the loop a user would write, in one process: speed, overheads, and where the time goes.

    python -m benchmarks.train_step [--spec specs/raventos-base.json] [--save]

Both train the same model on the same batches from the same initial parameters, in turn, block by block; the ratio is
the median over the blocks. The batches are drawn before the clock starts, and sampling is timed apart.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.environment import add_save_option, describe_machine, print_table, report
from benchmarks.user_loop import UserLoop
from icl.backends import get_backend
from icl.core.backend import Tree
from icl.core.model import parameter_shapes
from icl.core.plan import build_plan
from icl.core.spec import Spec, with_fields
from icl.core.step import build_eval, build_train, init_state
from icl.core.tasks import sample_batches, sample_task_pool
from icl.io.codec import load_spec
from icl.io.rundir import open_run
from icl.io.store import open_store

ROOT = Path(__file__).parent.parent


class OurLoop:
    """The compiled steps of `icl.core.step` on the CPU backend, a block of steps at a call."""

    def __init__(self, spec: Spec, num_steps: int) -> None:
        self._backend = get_backend("cpu")
        self._advance = build_train(spec, self._backend, num_steps=num_steps)
        self.state = self._backend.to_device(init_state(spec))

    def run(self, batches: Tree) -> list[float]:
        """One update for each batch of the leading axis; returns the losses."""
        self.state, metrics = self._advance(self.state, batches, batches["xs"].shape[0])
        losses: list[float] = self._backend.to_cpu(metrics)["train/loss"].tolist()
        return losses


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = perf_counter()
    work()
    return perf_counter() - start


def compare(spec: Spec, threads: int, blocks: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step of both loops and their ratio at a number of threads."""
    torch.set_num_threads(threads)
    pool = sample_task_pool(spec)
    ours, users = OurLoop(spec, steps), UserLoop(spec)
    our_ms, user_ms, worst = [], [], 0.0
    for block in range(blocks + 1):
        batches = sample_batches(spec, range(block * steps, (block + 1) * steps), pool)
        each = [{key: leaf[i] for key, leaf in batches.items()} for i in range(steps)]
        losses: dict[str, list[float]] = {}
        user = seconds(lambda: losses.update(user=users.run(each)))  # noqa: B023
        our = seconds(lambda: losses.update(ours=ours.run(batches)))  # noqa: B023
        if block == 0:  # warms both up, and shows that they compute the same before rounding has had time to grow
            worst = max(abs(a - b) / b for a, b in zip(losses["ours"], losses["user"], strict=True))
            continue
        our_ms.append(1e3 * our / steps)
        user_ms.append(1e3 * user / steps)
    ratios = [theirs / mine for theirs, mine in zip(user_ms, our_ms, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return {
        "threads": threads,
        "user_ms": median(user_ms),
        "our_ms": median(our_ms),
        "ratio": median(ratios),
        "ratio_quartiles": [low, high],
        "largest_relative_loss_difference": worst,
    }


def overheads(spec: Spec, steps: int, step_ms: float) -> dict[str, Any]:
    """What a run costs besides its steps, at the spec's own cadences, as shares of the training time."""
    backend, pool = get_backend("cpu"), sample_task_pool(spec)
    sampling = min(seconds(lambda: sample_batches(spec, range(steps), pool)) for _ in range(3)) / steps
    small = with_fields(with_fields(spec, "task", num_examples=2, num_tasks=1), "training", batch_size=1)
    loop, batches = OurLoop(small, steps), sample_batches(small, range(steps), sample_task_pool(small))
    host = min(seconds(lambda: loop.run(batches)) for _ in range(3)) / steps
    state = backend.to_device(init_state(spec))
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(open_store(folder), spec)
        params, metadata = {"params": state["params"]}, {"backend": "{}"}
        checkpoint = median(
            seconds(lambda: run.save_checkpoint(step, backend.to_cpu(params), metadata))  # noqa: B023
            for step in range(20)
        )
        resume = median(
            seconds(lambda: run.save_state(step, backend.to_cpu(state) | {"step": torch.tensor(step)}, metadata))  # noqa: B023
            for step in range(20)
        )
    small_evaluation = with_fields(spec, "task", num_tasks=None)
    evaluate = build_eval(small_evaluation, backend, None)
    evaluate(state)
    evaluation = median(seconds(lambda: evaluate(state)) for _ in range(3))
    plan, training = build_plan(spec), spec.training.total_steps * step_ms / 1e3
    return {
        "sampling_ms_a_step": 1e3 * sampling,
        "host_ms_a_step": 1e3 * host,  # the same operations on almost nothing: dispatch, autograd and Python
        "checkpoint_ms": 1e3 * checkpoint,
        "save_state_ms": 1e3 * resume,
        "evaluation_ms": 1e3 * evaluation,
        "checkpoints_share": checkpoint * len(plan.checkpoint) / training,
        "states_share": resume * len(plan.save_state) / training,
        "evaluations_share": evaluation * len(plan.evaluate) / training,
    }


def where_the_time_goes(spec: Spec, steps: int) -> list[dict[str, Any]]:
    """The share of each operation in our step, largest first, by its own time."""
    loop, batches = OurLoop(spec, steps), sample_batches(spec, range(steps), sample_task_pool(spec))
    loop.run(batches)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loop.run(batches)
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    return [
        {"operation": e.key, "share": e.self_cpu_time_total / total, "calls_a_step": e.count / steps}
        for e in events[:12]
    ]


def matmul_gflops(rows: int, width: int) -> float:
    """Billions of operations a second in the step's typical product, (rows, width) times (width, width)."""
    left, right = torch.randn(rows, width), torch.randn(width, width)
    product = torch.empty(rows, width)
    best = min(seconds(lambda: torch.mm(left, right, out=product)) for _ in range(100))
    return 2e-9 * rows * width * width / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default=str(ROOT / "specs" / "hoogland-L2H4Minf.json"))
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    add_save_option(parser)
    options = parser.parse_args()
    spec = load_spec(options.spec)
    speed = [compare(spec, threads, options.blocks, options.steps) for threads in (1, 2)]
    print_table(speed)
    cost = overheads(spec, options.steps, speed[-1]["our_ms"])
    print_table([cost])
    torch.set_num_threads(1)
    operations = where_the_time_goes(spec, options.steps)
    print_table(operations)
    embed: int = parameter_shapes(spec)["token_embedding.weight"][0]
    rows = (2 * spec.task.num_examples - 1) * spec.training.batch_size
    floor = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        floor[str(threads)] = matmul_gflops(rows, embed)
    print(f"matmul ({rows}, {embed}) x ({embed}, {embed}), GFLOP/s: {floor}")
    report(
        f"train_step-{Path(options.spec).stem}",
        {
            "speed": speed,
            "overheads": cost,
            "profile_one_thread": operations,
            "matmul_gflops": floor,
            **describe_machine(),
        },
        save=options.save,
    )


if __name__ == "__main__":
    main()
