"""The host's work for a training step on XLA: the loop people write, a pure step with a barrier, and fused steps.

    PJRT_DEVICE=CPU python -m benchmarks.xla_host_time [--spec specs/hoogland-L2H4Minf.json] [--save]

Host time is the main thread's processor time, sampling included: what a chip waits for when the program itself is fast.
All rows are measured in one process, after each has compiled; compile time and programs are those of the warm-up.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch

from benchmarks.environment import add_save_option, describe_machine, print_table, report
from benchmarks.user_loop import UserLoop
from icl.backends import get_backend
from icl.core.backend import Backend
from icl.core.spec import Spec
from icl.core.step import build_train, init_state, train_step
from icl.core.tasks import sample_batch, sample_batches, sample_task_pool
from icl.io.codec import load_spec

ROOT = Path(__file__).parent.parent
_WARM_UP = 3  # steps of the unfused loops
Run = Callable[[int], None]  # trains that many steps


def users_loop(spec: Spec, backend: Backend) -> Run:
    """Seeds, barriers around each step, batches drawn on the device, torch.optim.Adam and OneCycleLR."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    loop, task, batch = UserLoop(spec, device), spec.task, spec.training.batch_size
    done = 0

    def run(steps: int) -> None:
        nonlocal done
        for _ in range(steps):
            torch.manual_seed(spec.seeds.sampling + done)
            xm.set_rng_state(spec.seeds.sampling + done)
            torch_xla.sync()
            ws = torch.randn(batch, task.task_dim, 1, device=device)
            xs = torch.randn(batch, task.num_examples, task.task_dim, device=device)
            ys = xs @ ws + task.noise_variance**0.5 * torch.randn(batch, task.num_examples, 1, device=device)
            loop.step({"xs": xs, "ys": ys})
            torch_xla.sync()
            done += 1

    return run


def pure_step(spec: Spec, backend: Backend) -> Run:
    """`train_step` traced and handed to the device one step at a time."""
    step = backend.compile(lambda state, batch: train_step(spec, state, batch)[0])
    state, pool, done = backend.to_device(init_state(spec)), sample_task_pool(spec), 0

    def run(steps: int) -> None:
        nonlocal state, done
        for _ in range(steps):
            state = step(state, backend.to_device(sample_batch(spec, done, pool)))
            done += 1

    return run


def fused(spec: Spec, backend: Backend, num_steps: int) -> Run:
    """What `icl` runs: `num_steps` steps in one program."""
    advance = build_train(spec, backend, num_steps=num_steps)
    state, pool, done = backend.to_device(init_state(spec)), sample_task_pool(spec), 0

    def run(steps: int) -> None:
        nonlocal state, done
        for _ in range(steps // num_steps):
            batches = sample_batches(spec, range(done, done + num_steps), pool)
            state, _ = advance(state, backend.to_device(batches), num_steps)
            done += num_steps

    return run


def measure(name: str, run: Run, backend: Backend, warm_up: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step, after `warm_up` steps."""
    before = backend.counters()
    run(warm_up)
    backend.synchronize()
    warm = backend.counters()
    wall, host = perf_counter(), thread_time()
    run(steps)
    host = thread_time() - host
    backend.synchronize()
    wall = perf_counter() - wall
    after = backend.counters()
    return {
        "loop": name,
        "host_ms": 1e3 * host / steps,
        "wall_ms": 1e3 * wall / steps,
        "programs": int(warm["compilations"] - before["compilations"]),
        "compile_s": warm["compile_seconds"] - before["compile_seconds"],
        "compiled_later": int(after["compilations"] - warm["compilations"]),
        "cpu_fallbacks": int(after["cpu_fallbacks"] - before["cpu_fallbacks"]),
        "uploads_a_step": (after["transfers_to_device"] - warm["transfers_to_device"]) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default=str(ROOT / "specs" / "hoogland-L2H4Minf.json"))
    parser.add_argument("--steps", type=int, default=100, help="steps measured for each loop, a multiple of 100")
    add_save_option(parser)
    options = parser.parse_args()
    spec = load_spec(options.spec)
    if spec.training.total_steps < options.steps + _WARM_UP:
        parser.error(f"the spec has {spec.training.total_steps} steps; OneCycleLR needs {options.steps + _WARM_UP}")
    backend = get_backend("xla")
    loops = [
        ("user's, a barrier a step", users_loop(spec, backend), _WARM_UP),
        ("pure step, a barrier a step", pure_step(spec, backend), _WARM_UP),
        *((f"{n} fused", fused(spec, backend, n), 2 * n) for n in (1, 10, 100)),
    ]
    rows = [measure(name, run, backend, warm_up, options.steps) for name, run, warm_up in loops]
    print_table([{**row, "times_less_host": rows[0]["host_ms"] / row["host_ms"]} for row in rows])
    result = {"rows": rows, "steps": options.steps, "backend": backend.describe(), **describe_machine()}
    report("xla_host_time", result, save=options.save)


if __name__ == "__main__":
    main()
