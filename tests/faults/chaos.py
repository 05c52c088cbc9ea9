"""The chaos campaign: workers of a sweep, and the sweep itself, killed until it is done.

`python -m tests.faults.chaos --runs 60 --workers 4` takes some minutes. Then every run is complete, each once, with the
bits of an undisturbed sweep; no process is left and every attempt is in a log. It ends with one line and exit code 0 or
1.
"""

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from icl.io.manifest import Manifest
from icl.io.store import open_store
from icl.io.sweepfile import load_sweep
from tests.faults.runs import SPEC, Report, differences, print_report, read_saved, verify

WORKER, SWEEP = "of workers", "of the sweep"  # kinds of kills
_SECONDS = 1800.0
_ENDING = re.compile(r" (\S+): (complete|already_complete)$", re.MULTILINE)


@attrs.frozen
class Place:
    """A sweep file, a store, and where the sweep keeps its logs."""

    folder: Path
    file: Path
    name: str

    @property
    def store(self) -> Path:
        return self.folder / f"{self.name}-store"

    @property
    def state(self) -> Path:
        return self.folder / f"{self.name}-state"

    @property
    def session(self) -> Path:
        (found,) = (self.state / "icl" / "sweeps").iterdir()
        return found

    def start(self, devices: str, *arguments: str) -> subprocess.Popen[bytes]:
        """`python -m icl.sweep` in the background."""
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"{self.name}.log").open("ab") as log:
            command = [sys.executable, "-m", "icl.sweep", str(self.file), "--store", str(self.store)]
            return subprocess.Popen(
                [*command, "--devices", devices, *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "XDG_STATE_HOME": str(self.state)},
            )

    def workers(self) -> list[int]:
        """The workers of this sweep that are alive, whoever started them."""
        mark = f"XDG_STATE_HOME={self.state}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                ours = mark in (entry / "environ").read_bytes().split(b"\0")
                if ours and b"icl.engines.worker" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has just ended
                continue
        return found

    def logs(self) -> str:
        """Everything that workers have said."""
        return "\n".join(file.read_text() for file in sorted(self.session.glob("cpu-*.log")))


def write_sweep(folder: Path, runs: int, base: Mapping[str, Any] = SPEC) -> Path:
    """A sweep of so many runs, of the kill campaign's spec unless another is given."""
    data: dict[str, Any] = {"base": base, "grid": {"seeds.init": {"from": 0, "to": runs - 1}}}
    file = folder / "sweep.json"
    file.write_text(json.dumps(data))
    return file


def chaos(
    folder: Path,
    runs: int,
    workers: int,
    interval: float,
    sweep_kills: int,
    seed: int = 0,
    most_kills: float = math.inf,
) -> Report:
    """Run a sweep undisturbed, and again with kills about every `interval` seconds until it is done.

    Args:
        most_kills: then it is left in peace; where starting a worker takes as long as its turn comes round, no end of
            kills would mean no end of the sweep.
        sweep_kills: how many of the kills hit the sweep's own process, which is then started again.
    """
    chance = random.Random(seed)
    file = write_sweep(folder, runs)
    calm, wild = Place(folder, file, "calm"), Place(folder, file, "wild")
    assert calm.start(f"cpu:{workers}").wait(_SECONDS) == 0
    begun = time.monotonic()
    arguments = (f"cpu:{workers}", "--max-attempts", "1000")
    process, kills = wild.start(*arguments), Counter[str]()
    while True:
        try:
            code = process.wait(chance.uniform(0.5, 1.5) * interval)
            break
        except subprocess.TimeoutExpired:
            assert time.monotonic() - begun < _SECONDS, "it does not end"
        if kills.total() >= most_kills:
            continue
        if kills[SWEEP] < sweep_kills and kills.total() % 3 == 2:
            process.kill()
            process.wait()
            kills[SWEEP] += 1
            process = wild.start(*arguments)
        elif targets := wild.workers():
            try:
                os.kill(chance.choice(targets), signal.SIGKILL)
                kills[WORKER] += 1
            except ProcessLookupError:
                continue
    faults = [] if code == 0 else [f"exit code {code}: {(folder / 'wild.log').read_text()}"]
    faults += [f"process {pid} is left" for pid in wild.workers()]
    verified = verify(wild.store)
    if verified.returncode != 0:
        faults.append(verified.stdout + verified.stderr)
    names = [member.name for member in load_sweep(file).members]
    wrong = {name: found for name in names if (found := _faults_of(name, calm, wild))}
    faults += [f"{name}: {fault}" for name, found in wrong.items() for fault in found]
    attempts = sum(len(Manifest(open_store(str(wild.store)), name).attempts()) for name in names)
    started_in_logs = wild.logs().count(": started\n")
    if started_in_logs < attempts:
        faults.append(f"the logs have the beginning of {started_in_logs} of {attempts} attempts")
    return Report(kills, attempts, len(names), len(names) - len(wrong), faults)


def _faults_of(name: str, calm: Place, wild: Place) -> list[str]:
    endings = Counter(ending for ending in _ENDING.findall(wild.logs()) if ending[0] == name)
    faults = differences(read_saved(calm.store, name), read_saved(wild.store, name))
    if endings[name, "complete"] > 1 or not endings:
        faults.append(f"completed {endings[name, 'complete']} times")
    return faults


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0 when everything is right, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description="Kill the workers of a sweep.")
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--interval", type=float, default=3.0, help="seconds between two kills, on average")
    parser.add_argument("--sweep-kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = chaos(Path(folder), options.runs, options.workers, options.interval, options.sweep_kills, options.seed)
    return print_report(result.line(), result.faults)


if __name__ == "__main__":
    sys.exit(main())
