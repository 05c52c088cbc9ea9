"""The crowd: many processes started at once on one spec and one store end with exactly one result, the right one.

`python -m tests.faults.crowd [--processes 8] [--store gcs] [--heartbeat off] [--rounds 3]`
It ends with one line a round and exit code 0 or 1.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import attrs

from tests.emulator import BUCKET, Emulator
from tests.faults.runs import (
    SPEC,
    Saved,
    differences,
    finish,
    print_report,
    read_saved,
    start,
    store_server,
    verify,
    write_spec,
)

ENDS = {(0, "complete"), (0, "already_complete"), (6, "running_elsewhere")}


@attrs.frozen
class Crowd:
    """How each process ended, (exit code, status) -> how many, and what was found wrong."""

    ends: Counter[tuple[int, str]]
    faults: list[str]

    def line(self) -> str:
        """The closing line."""
        ends = ", ".join(f"{count} {status} (exit {code})" for (code, status), count in sorted(self.ends.items()))
        return f"{self.ends.total()} processes at once: {ends}; {len(self.faults)} faults"


def crowd(folder: Path, processes: int, *, heartbeat: bool, reference: Saved, server: Emulator | None = None) -> Crowd:
    """Start so many processes at once, and compare what they leave with an undisturbed run.

    Args:
        folder: an empty one, for the store and the logs.
        heartbeat: without it all of them train, and only verification keeps them from harm.
        server: an emulator to keep the store in, which STORAGE_EMULATOR_HOST names.
    """
    run = {**SPEC["run"], "heartbeat_seconds": 1.0 if heartbeat else None}
    spec = write_spec(folder / "spec.json", {**SPEC, "run": run})
    url = f"gs://{BUCKET}/{folder.name}" if server else str(folder / "store")
    logs = [folder / f"{number}.log" for number in range(processes)]
    started = [start(spec, url, log) for log in logs]
    ends = Counter[tuple[int, str]]()
    faults = []
    for process, log in zip(started, logs, strict=True):
        code, stdout = finish(process, seconds=600)
        end = (code, json.loads(stdout)["status"] if stdout else "")
        ends[end] += 1
        if end not in ENDS:
            faults.append(f"{end}: {log.read_text().splitlines()[-1:]}")
    if ends[0, "complete"] < 1 or (heartbeat and ends[0, "complete"] > 1):
        faults.append(f"{ends[0, 'complete']} trained to the end")
    verified = verify(url)
    if verified.returncode != 0:
        faults.append(verified.stdout + verified.stderr)
    faults += differences(reference, read_saved(url))
    return Crowd(ends, faults)


def undisturbed(folder: Path) -> Saved:
    """What one process alone leaves."""
    process = start(write_spec(folder / "spec.json", SPEC), folder / "store", folder / "log")
    assert finish(process)[0] == 0
    return read_saved(folder / "store")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0 when every round is right, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.crowd", description="Start many processes at once.")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--store", choices=("local", "gcs"), default="local")
    parser.add_argument("--heartbeat", choices=("on", "off"), default="on")
    options = parser.parse_args(arguments)
    codes = []
    with tempfile.TemporaryDirectory() as temporary, store_server(options.store, Path(temporary)) as server:
        alone = Path(temporary) / "alone"
        alone.mkdir()
        reference = undisturbed(alone)
        for number in range(options.rounds):
            folder = Path(temporary) / f"round-{number}"
            folder.mkdir()
            heartbeat = options.heartbeat == "on"
            result = crowd(folder, options.processes, heartbeat=heartbeat, reference=reference, server=server)
            codes.append(
                print_report(f"{options.store}, heartbeat {options.heartbeat}: {result.line()}", result.faults)
            )
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
