"""What a step costs beside other processes, by the number of threads and by how these wait for each other.

    python -m benchmarks.busy_machine [--blocks 7] [--steps 20] [--save]

Every row is a process of its own, since OpenMP reads its variables when it is loaded: `spinning` is OpenMP's default,
`limited` is what `python -m icl.run` sets, and `passive` has OMP_WAIT_POLICY=PASSIVE. The neighbour is a loop of one
thread that does nothing, or the same training on all cores, spinning. Run it on a machine with nothing else to do:
`nothing` is only as quiet as that.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from benchmarks.environment import add_save_option, describe_machine, print_table, report
from icl.backends import get_backend
from icl.core.spec import with_fields
from icl.core.step import build_train, init_state
from icl.core.tasks import sample_batches
from icl.io.codec import load_spec, with_run
from icl.machine import SPIN_COUNT, allowed_cores

ROOT = Path(__file__).parent.parent
HERE = [sys.executable, "-m", "benchmarks.busy_machine"]
POLICIES: dict[str, dict[str, str]] = {
    "spinning": {},
    "limited": {"GOMP_SPINCOUNT": SPIN_COUNT},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
PLAIN = "print(flush=True)\nwhile True: pass"


def time_steps(spec: str, threads: int | None, blocks: int | None, steps: int) -> Iterator[float]:
    """Milliseconds a step of each block on the CPU backend, the first block being left out; without end for None."""
    read = with_run(load_spec(spec), max_chunk=steps)
    backend = get_backend("cpu", threads=threads)
    advance, state = build_train(read, backend, num_steps=read.run.max_chunk), backend.to_device(init_state(read))
    batches = sample_batches(with_fields(read, "task", num_tasks=None), range(steps), None)
    block = 0
    while blocks is None or block <= blocks:
        start = perf_counter()
        state, _ = advance(state, batches, steps)
        if block:
            yield 1e3 * (perf_counter() - start) / steps
        block += 1


@contextmanager
def beside(command: list[str] | None) -> Iterator[None]:
    """A neighbour that has begun, if any; it is gone afterwards."""
    if command is None:
        yield
        return
    with subprocess.Popen(command, env=policy("spinning"), stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()


def policy(name: str) -> dict[str, str]:
    """The environment of a process whose threads wait in one of the ways."""
    said = ("GOMP_SPINCOUNT", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    kept = {key: value for key, value in os.environ.items() if key not in said}
    return kept | POLICIES[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default=str(ROOT / "specs" / "hoogland-L2H4Minf.json"))
    parser.add_argument("--beside", action="append", choices=["nothing", "plain", "openmp"], help="default: each")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--measure", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    parser.add_argument("--neighbour", action="store_true", help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.neighbour:
        print(flush=True)
        for _ in time_steps(options.spec, None, None, options.steps):
            pass
        return
    if options.measure is not None:
        print(json.dumps(list(time_steps(options.spec, options.measure, options.blocks, options.steps))))
        return
    cores = allowed_cores()
    neighbours = {
        "nothing": None,
        "plain": [sys.executable, "-c", PLAIN],
        "openmp": [*HERE, "--neighbour", "--spec", options.spec],
    }
    rows: list[dict[str, Any]] = []
    for name in options.beside or neighbours:
        with beside(neighbours[name]):
            for threads in dict.fromkeys((1, cores)):
                for waiting in list(POLICIES)[: 1 if threads == 1 else None]:  # one thread waits for none
                    arguments = ["--measure", str(threads), "--blocks", str(options.blocks), "--steps"]
                    command = [*HERE, *arguments, str(options.steps), "--spec", options.spec]
                    said = subprocess.run(command, env=policy(waiting), stdout=subprocess.PIPE, check=True).stdout
                    each = json.loads(said)
                    low, _, high = quantiles(each, n=4)
                    row = {"beside": name, "threads": threads, "waiting": waiting if threads > 1 else "-"}
                    rows.append({**row, "ms_a_step": median(each), "quartiles": [low, high]})
    print_table(rows)
    report("busy_machine", {"rows": rows, "cores_allowed": cores, **describe_machine()}, save=options.save)


if __name__ == "__main__":
    main()
