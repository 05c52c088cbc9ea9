"""The kill campaign: training killed at any moment, also within writes, ends with the bits of an unbroken run.

`python -m tests.faults.campaign --kills 30 [--backend xla] [--store gcs --server-kills 20]` takes some ten seconds a
kill. On gcs the emulator is the store, and is itself killed and started again on the same folder while a run trains.
It ends with one line and exit code 0 or 1.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import attrs

from icl.io.codec import spec_from_data
from icl.io.names import run_name
from tests.emulator import BUCKET, Emulator
from tests.faults.runs import (
    SPEC,
    Process,
    Report,
    differences,
    finish,
    print_report,
    read_saved,
    start,
    store_server,
    verify,
    wait_until,
    write_spec,
)

SERVER = "of the server"  # a kind of kill, beside the moments at which a run is killed
WRITTEN = ("state", "checkpoints", "metrics")


def campaign(
    folder: Path,
    kills: int,
    seed: int = 0,
    backend: str = "cpu",
    server: Emulator | None = None,
    server_kills: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Kill trainings `kills` times, several times each, and compare each with an unbroken run.

    Args:
        folder: an empty one, for the stores and logs.
        seed: of the choice of moments; when a process gets there is up to the machine.
        backend: what they train on.
        server: an emulator to keep the stores in, which STORAGE_EMULATOR_HOST names; without one they are local.
        server_kills: how often that is killed while a run trains, and started again.
        say: told a line for every run.
    """
    chance = random.Random(seed)
    spec = write_spec(folder / "spec.json", {**SPEC, "run": {**SPEC["run"], "backend": backend}})
    whole = _Place(folder, "whole", server)
    begun = time.monotonic()
    process = start(spec, whole.url, whole.log)
    attempts = whole.files / run_name(spec_from_data(SPEC)) / "attempts"
    wait_until(lambda: bool(_published(attempts)), process)
    startup = time.monotonic() - begun
    if finish(process)[0] != 0:
        raise RuntimeError(whole.log.read_text())
    training = time.monotonic() - begun - startup
    reference = read_saved(whole.url)
    say(f"unbroken: {startup:.1f} s to start, {training:.1f} s to train and save")
    result = Report(Counter(), 0, 0, 0, [])
    while (left := kills + result.kills[SERVER] - result.kills.total()) > 0 or result.kills[SERVER] < server_kills:
        place = _Place(folder, f"killed-{result.runs + 1}", server)
        killer = _Killer(spec, place, chance, startup, training)
        planned = min(left, chance.randint(3, 7))
        while killer.kills.total() < planned and killer.kill_once():
            pass
        if server is not None and result.kills[SERVER] < server_kills:
            killer.kill_server(server, min(server_kills - result.kills[SERVER], chance.randint(3, 7)))
        killer.complete()
        found = killer.faults or differences(reference, read_saved(place.url))
        if not killer.kills:
            found.append(f"{place.name} ended before any kill")
        say(f"{place.name}: {killer.kills.total()} kills, {'equal' if not found else '; '.join(found)}")
        result = Report(
            result.kills + killer.kills,
            result.attempts + killer.starts,
            result.runs + 1,
            result.equal + (not found),
            result.faults + found,
        )
        if found:
            break
    return result


@attrs.frozen
class _Place:
    """A store of its own, where its objects are seen as files, and a log."""

    folder: Path
    name: str
    server: Emulator | None

    @property
    def url(self) -> str:
        return f"gs://{BUCKET}/{self.name}" if self.server else str(self.folder / self.name)

    @property
    def files(self) -> Path:
        return (self.server.folder / BUCKET if self.server else self.folder) / self.name

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"


class _Killer:
    """One run that is killed several times and then left to complete."""

    def __init__(self, spec: Path, place: _Place, chance: random.Random, startup: float, training: float) -> None:
        self.kills, self.starts, self.exit_code = Counter[str](), 0, -1
        self.faults: list[str] = []
        self._writers = set[str]()  # whose unfinished files were seen
        self._spec, self._place, self._chance = spec, place, chance
        self._startup, self._training = startup, training
        self._run = place.files / run_name(spec_from_data(json.loads(spec.read_text())))

    def kill_server(self, server: Emulator, kills: int) -> None:
        """Start the run, and kill the store's server and start it again up to `kills` times while it trains."""
        if self.exit_code != -1:
            return
        attempts = _published(self._run / "attempts")
        process = self._start()
        alive = wait_until(lambda: _published(self._run / "attempts") != attempts, process)
        for _ in range(kills):
            if not alive or not self._wait(process, self._training / kills):
                break
            server.kill()
            server.start()
            self.kills[SERVER] += 1
        self.exit_code = finish(process)[0]

    def kill_once(self) -> bool:
        """Start the run and kill it at a moment of chance; False if it ended before."""
        moments = {"at startup": 1, "while training": 3, "at a new object": 4, "at completion": 1}
        if self._place.server is None:
            moments["at a temporary file"] = 5
        moment = self._chance.choices(list(moments), list(moments.values()))[0]
        attempts = _published(self._run / "attempts")
        process = self._start()
        if not self._reach(moment, process, attempts):
            self.exit_code = finish(process)[0]
            return False
        process.kill()
        code, _ = finish(process)
        if code != -9:
            self.exit_code = code
            return False
        self.kills[moment] += 1
        began = _published(self._run / "attempts") != attempts
        self._look_for_faults(moment, tidied=began)
        return True

    def complete(self) -> None:
        """Let the run end, and check that the store is intact and free of unfinished files."""
        if self.exit_code == -1:
            self.exit_code = finish(self._start())[0]
        if self.exit_code != 0:
            log = self._place.log.read_text().replace("\r", "\n").splitlines()
            self.faults.append(f"{self._place.name}: exit code {self.exit_code}: {log[-1:]}")
        verified = verify(self._place.url)
        if verified.returncode != 0:
            self.faults.append(verified.stdout + verified.stderr)
        self.faults += [f"left behind: {path}" for path in self._temporaries()]

    def _start(self) -> Process:
        self.starts += 1
        return start(self._spec, self._place.url, self._place.log)

    def _temporaries(self) -> list[Path]:
        return [] if self._place.server else list(self._place.files.rglob(".tmp-*"))

    def _reach(self, moment: str, process: Process, attempts: set[str]) -> bool:
        if moment == "at startup":
            return self._wait(process, self._startup)
        if moment == "at completion":
            return wait_until(lambda: (self._run / "complete.json").exists(), process)
        if not wait_until(lambda: _published(self._run / "attempts") != attempts, process):
            return False
        if not self._wait(process, self._training / 4):
            return False
        watched = self._run / self._chance.choice(WRITTEN)
        if moment == "at a temporary file":
            return wait_until(lambda: any(name.startswith(".tmp-") for name in _names(watched)), process)
        if moment == "at a new object":
            before = _published(watched)
            return wait_until(lambda: bool(_published(watched) - before), process)
        return True

    def _wait(self, process: Process, longest: float) -> bool:
        instant = time.monotonic() + self._chance.uniform(0, longest)
        return wait_until(lambda: time.monotonic() >= instant, process)

    def _look_for_faults(self, moment: str, tidied: bool) -> None:
        """A kill leaves a store in which nothing is wrong, and only the killed process's own unfinished files."""
        if not self._place.files.exists():
            return
        verified = verify(self._place.url)
        if verified.returncode != 0:
            self.faults.append(f"killed {moment}: {verified.stdout}")
        writers = {path: path.name.split("-")[1] for path in self._temporaries()}
        if tidied:  # it got as far as removing what those before it had left
            others = [path for path, writer in writers.items() if writer in self._writers]
            self.faults += [f"killed {moment}: {path} of a dead process" for path in others]
            if len(set(writers.values())) > 1:
                self.faults.append(f"killed {moment}: unfinished files of {len(set(writers.values()))} processes")
        self._writers.update(writers.values())


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def _published(folder: Path) -> set[str]:
    return {name for name in _names(folder) if not name.startswith(".tmp-")}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0 when every run is equal and nothing else is wrong, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.campaign", description="Kill trainings, compare bits."
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--store", choices=("local", "gcs"), default="local")
    parser.add_argument("--server-kills", type=int, default=0, help="with --store gcs")
    parser.add_argument("--folder", type=Path, help="keep the stores and logs there; without it they are removed")
    options = parser.parse_args(arguments)
    if options.server_kills and options.store != "gcs":
        parser.error("--server-kills needs --store gcs")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with store_server(options.store, folder) as server:
            result = campaign(
                folder,
                options.kills,
                options.seed,
                options.backend,
                server,
                options.server_kills,
                say=lambda line: print(line, file=sys.stderr, flush=True),
            )
    return print_report(result.line(), result.faults)


if __name__ == "__main__":
    sys.exit(main())
