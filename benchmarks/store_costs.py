"""What a run of 10,000 checkpoints costs on object storage, with 50 ms added to each request.

    python -m benchmarks.store_costs [--checkpoints 10000] [--runs 1000] [--save]

Against the GCS emulator behind a proxy on loopback, with as many objects in an answer to a listing as Google gives.
Parameters are of the published L2H4 model, 210 kB a checkpoint. "packed" is what the same costs when 64 checkpoints
share an object: the alternative that docs/decisions/0010-single-checkpoint-objects.md decides against. The emulator's
own seconds, summed over requests that run side by side, are most of a listing here: it looks at every object of a
bucket for each page, which Google does not.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch

from benchmarks.environment import add_save_option, describe_machine, print_table, report
from icl.core.model import init_params
from icl.core.spec import SeedsSpec
from icl.core.step import init_state
from icl.io.codec import load_spec
from icl.io.manifest import list_runs
from icl.io.rundir import RunDir, open_run
from icl.io.store import open_store
from icl.io.tensors import pack
from icl.io.verify import verify_run
from icl.io.writer import Writer
from icl.member import SAVES_AT_ONCE
from icl.results import load_run
from tests.emulator import BUCKET, Proxy, emulator, proxy

SPEC = Path(__file__).parent.parent / "specs" / "hoogland-L2H4Minf.json"
PACKED = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--segments", type=int, default=500)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds added to each request")
    add_save_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, emulator(Path(temporary)) as target, proxy(target) as server:
        for bucket in ("many", "fresh"):  # apart, because the emulator looks at every object of a bucket to list some
            (target.folder / bucket).mkdir()
        os.environ["STORAGE_EMULATOR_HOST"] = target.url  # to fill it, without the added time
        run = fill(options.checkpoints, options.segments)
        fill_runs(options.runs)
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        server.latency = options.latency
        rows = measure(server, run, options.checkpoints)
    print_table(rows)
    report("store_costs", {"latency_s": options.latency, "rows": rows, **describe_machine()}, save=options.save)


def fill(checkpoints: int, segments: int) -> RunDir:
    """A run of so many checkpoints, evenly spaced, and of so many metric segments of 1,000 steps."""
    spec = load_spec(SPEC)
    run = open_run(open_store(f"gs://{BUCKET}/one"), spec)
    params, metadata = init_params(spec), {"backend": "{}"}
    every = spec.training.total_steps // checkpoints
    list(run.store.map(lambda i: run.save_checkpoint(i * every, params, metadata), range(checkpoints)))
    losses = torch.rand(1000)
    rows = {"pretrain/mse": 1.0, "true/mse": 1.0}

    def segment(index: int) -> None:
        run.save_segment(index * 1000, (index + 1) * 1000, losses, {index * 1000 + 1000: rows}, metadata)

    list(run.store.map(segment, range(segments)))
    run.save_state(segments * 1000, init_state(spec), metadata)
    return run


def fill_runs(count: int) -> None:
    """So many small runs in one store."""
    spec, store = load_spec(SPEC), open_store("gs://many/runs")
    specs = [attrs.evolve(spec, seeds=SeedsSpec(init=index)) for index in range(count)]

    def one(index: int) -> None:
        run = open_run(store, specs[index])
        store.create(f"{run.name}/state/step-{index:012d}.safetensors", b"")
        if index % 2:
            run.manifest.mark_complete({"step": index})

    list(store.map(one, range(count)))


def measure(server: Proxy, run: RunDir, checkpoints: int) -> list[dict[str, Any]]:
    """Time, requests and bytes of each thing that a user or a trainer does."""
    rows = []

    def row(what: str, act: Callable[[], Any]) -> Any:
        server.requests.clear()
        server.bytes_read, server.emulator_seconds, begun = 0, 0.0, perf_counter()
        result = act()
        rows.append(
            {
                "what": what,
                "seconds": perf_counter() - begun,
                "requests": len(server.requests),
                "emulator_seconds": server.emulator_seconds,
                "MB_read": server.bytes_read / 1e6,
            }
        )
        return result

    url = f"gs://{BUCKET}/one"
    opened = row("load_run", lambda: load_run(url, run.name))
    assert len(row("run.steps", lambda: opened.steps)) == checkpoints
    row("run.params(step)", lambda: opened.params(opened_step(checkpoints)))
    row("run.metrics()", opened.metrics)
    row("resume: newest state", run.newest_state)
    row("verify one run", lambda: list(verify_run(run)))
    row("ls of many runs", lambda: list_runs(open_store("gs://many/runs")))
    params, metadata = opened.params(0), {"backend": "{}"}
    fresh = RunDir(open_store("gs://fresh/runs"), run.name)

    def save(count: int) -> float:
        begun = perf_counter()
        with Writer(persist=False, num_threads=fresh.store.concurrency(SAVES_AT_ONCE)) as writer:
            for step in range(count):
                writer.submit(lambda step=step: fresh.save_checkpoint(step, params, metadata), alone=False)  # type: ignore[misc]
            return perf_counter() - begun

    waited = row(f"save {PACKED} checkpoints", lambda: save(PACKED))
    rows.append(
        {
            "what": "  of it the training thread waits",
            "seconds": waited,
            "requests": 0,
            "emulator_seconds": 0.0,
            "MB_read": 0.0,
        }
    )
    data = pack(params, metadata)
    row(f"packed: save {PACKED}", lambda: fresh.store.create("pack", data * PACKED))
    row("packed: steps, from the names", lambda: fresh.store.list())
    row("packed: params(step), a range", lambda: read_range(fresh, len(data)))
    return rows


def opened_step(checkpoints: int) -> int:
    """A step in the middle that is saved."""
    return load_spec(SPEC).training.total_steps // checkpoints * (checkpoints // 2)


def read_range(run: RunDir, size: int) -> None:
    """An index, and one checkpoint out of a pack."""
    files, path = run.store._files, "fresh/runs/pack"
    files.cat_file(path, start=0, end=4096)
    files.cat_file(path, start=size, end=2 * size)


if __name__ == "__main__":
    main()
