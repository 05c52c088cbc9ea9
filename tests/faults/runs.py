"""Runs as real processes, what they leave in a store, and what a campaign reports of them."""

import io
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import attrs

from icl.core.backend import Tree, identical
from icl.io.manifest import list_runs
from icl.io.rundir import read_run
from icl.io.store import open_store
from icl.store import main as store_command
from tests.emulator import Emulator, emulator
from tests.forked import READ_ONCE, Forked, python

Process = subprocess.Popen[str] | Forked

SPEC: dict[str, Any] = {
    "task": {"task_dim": 3, "num_examples": 4, "num_tasks": 5},
    "model": {"num_heads": 2, "embed_dim": 8},
    "training": {"total_steps": 240, "batch_size": 8},
    "evaluation": {"batch_size": 16},
    "run": {
        "checkpoint_at": {"linear": 121},
        "evaluate_at": {"linear": 81},
        "save_state_every": 3,
        "log_every": 10,
        "max_chunk": 4,
    },
}


@attrs.frozen
class Saved:
    """Everything a complete run is compared by; metric values are hexadecimal, so that equal means equal bits."""

    checkpoints: dict[int, Tree]
    rows: dict[int, dict[str, str]]
    state: Tree


@attrs.frozen
class Report:
    """What a campaign did to runs, and what it found wrong.

    Attributes:
        kills: how often what was killed, or at which moment.
        attempts: at all runs together.
        equal: runs that ended with the bits of an undisturbed one.
    """

    kills: Counter[str]
    attempts: int
    runs: int
    equal: int
    faults: list[str]

    def line(self) -> str:
        """The closing line."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({kinds}), {self.attempts} attempts, {self.equal} of {self.runs} runs equal "
            f"to undisturbed ones bit for bit, {len(self.faults)} faults"
        )


def print_report(line: str, faults: list[str]) -> int:
    """Print the faults and the closing line of a campaign; returns its exit code."""
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    print(line, flush=True)
    return 1 if faults else 0


@contextmanager
def store_server(store: str, folder: Path) -> Iterator[Emulator | None]:
    """For the store "gcs" an emulator, to which gs:// URLs lead from now on; for "local" None."""
    if store == "local":
        yield None
        return
    with emulator(folder) as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        yield server


def write_spec(path: Path, data: dict[str, Any]) -> Path:
    """`data` as JSON at `path`, which is returned."""
    path.write_text(json.dumps(data))
    return path


def start(
    spec: Path | str,
    store: Path | str,
    log: Path,
    cwd: Path | None = None,
    hash_seed: str | None = None,
) -> Process:
    """`python -m icl.run` with one thread; stderr goes to a file, which is never full.

    It is forked, and ready at once, unless the seed of hashes is given: Python reads it as it starts.
    """
    command = ["-m", "icl.run", str(spec), "--store", str(store)]
    environment = {"PJRT_DEVICE": "CPU", **os.environ, **READ_ONCE}
    if hash_seed is None:
        return python(*command, log=log, cwd=cwd or Path.cwd(), environment=environment)
    environment |= {"PYTHONHASHSEED": hash_seed}
    with log.open("a") as stderr:
        return subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=cwd, env=environment
        )


def finish(process: Process, seconds: float = 300) -> tuple[int, str]:
    """The exit code and stdout of a process that ends by itself; one that does not is killed and is an error."""
    try:
        stdout, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.wait(), stdout


def wait_until(condition: Callable[[], bool], process: Process, seconds: float = 300) -> bool:
    """Whether `condition()` became true while the process lived; looks about every half millisecond."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"nothing happened in {seconds:g} s")
        try:
            process.wait(0.0005)
        except subprocess.TimeoutExpired:
            continue
        return False
    return True


def verify(store: Path | str) -> subprocess.CompletedProcess[str]:
    """What `python -m icl.store verify` says of a store, without the seconds of a process of its own."""
    command = ["verify", str(store)]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = store_command(command)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def read_saved(store: Path | str, name: str | None = None) -> Saved:
    """What a run has saved; without its name, the one run of a store."""
    opened = open_store(str(store), create=False)
    if name is None:
        (summary,) = list_runs(opened)
        name = summary.name
    run, _ = read_run(opened, name)
    newest = run.newest_state()
    return Saved(
        {step: run.load_checkpoint(step) for step in run.checkpoint_steps()},
        {step: {name: value.hex() for name, value in row.items()} for step, row in run.metrics().items()},
        newest[1] if newest else {},
    )


def differences(one: Saved, other: Saved, *, common: bool = False) -> list[str]:
    """Everything in which two runs differ; with `common`, only at steps and metrics that both have."""
    found = []
    steps, rows = one.checkpoints.keys() & other.checkpoints.keys(), one.rows.keys() & other.rows.keys()
    if not common and (one.checkpoints.keys() != other.checkpoints.keys() or one.rows.keys() != other.rows.keys()):
        found.append("other steps have checkpoints or metrics")
    if not {0, max(one.checkpoints)} <= steps or not rows:
        found.append("the first and the last step have no checkpoints, or no step has metrics")
    found += [
        f"checkpoint {step} differs" for step in steps if not identical(one.checkpoints[step], other.checkpoints[step])
    ]
    for step in rows:
        mine, theirs = one.rows[step], other.rows[step]
        names = mine.keys() & theirs.keys() if common else mine.keys() | theirs.keys()
        found += [f"{name} at step {step} differs" for name in names if mine.get(name) != theirs.get(name)]
    if not identical(one.state, other.state):
        found.append("the last state differs")
    return found
