"""The storage campaign: every storage call of a training fails in turn, in every way, and nothing saved is lost.

`python -m tests.faults.storage` takes some minutes; `--every 10` tries every tenth call. It prints a table of calls,
faults and outcomes, and ends with exit code 0 or 1. After each fault: the last good state loads, verify finds nothing,
and a second run on the mended store ends with the bits of an undisturbed one.
"""

import argparse
import errno
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from icl.core.architectures.timaeus import Timaeus
from icl.core.families.linear import LinearTask
from icl.core.spec import EvaluationSpec, RunSpec, Spec, StepsSpec, TrainingSpec
from icl.io import gcs, local
from icl.io.codec import with_run
from icl.io.errors import StoreError
from icl.io.rundir import read_run
from icl.io.store import open_store
from icl.io.verify import verify_run
from icl.loop import execute
from tests.emulator import BUCKET, Proxy, Request, behind_proxy, emulator
from tests.faults.runs import Saved, differences, read_saved

SPEC = Spec(
    task=LinearTask(task_dim=2, num_examples=2, num_tasks=3),
    model=Timaeus(num_layers=1, num_heads=1, embed_dim=4),
    training=TrainingSpec(total_steps=6, batch_size=4),
    evaluation=EvaluationSpec(batch_size=4),
    run=RunSpec(
        checkpoint_at=StepsSpec(also=(3,)),
        evaluate_at=StepsSpec(),
        save_state_every=2,
        max_chunk=2,
        heartbeat_seconds=60,
    ),
)
LOCAL_FAULTS = ("before", "after", "half", "ENOSPC", "EACCES", "EROFS")
GCS_FAULTS = ("before", "after", "half", "stall", "429", "503", "403")
SILENCE_SECONDS = 0.3  # after which a request that stalls is given up
Outcomes = Counter[tuple[str, str, str]]
"""(storage call, fault, outcome) -> how often."""


@attrs.define
class Disk:
    """The calls to the operating system by which a local store works, and the one that is to fail."""

    fault: str = ""
    nth: int = 0
    calls: list[str] = attrs.field(factory=list)
    hit: str = ""

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) != self.nth:
                return function(*arguments, **options)
            self.hit = name
            if self.fault == "after":
                result = function(*arguments, **options)
                if hasattr(result, "close"):
                    result.close()
            if self.fault == "half" and name == "write":
                function(arguments[0][: len(arguments[0]) // 2])
            code = getattr(errno, self.fault, errno.EIO)
            raise OSError(code, os.strerror(code))

        return call

    def open(self, *arguments: Any, **options: Any) -> Any:
        return _File(self, open(*arguments, **options))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(local, "open", self.wrap("open", self.open), raising=False)
        for name in ("fsync", "link", "unlink", "mkdir"):
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))
        patch.setattr(local, "read", self.wrap("read", local.read))
        for method, name in (("ls", "list"), ("rm_file", "delete")):
            patch.setattr(LocalFileSystem, method, self.wrap(name, getattr(LocalFileSystem, method)))


class _File:
    def __init__(self, disk: Disk, file: Any) -> None:
        self._file, self.write = file, disk.wrap("write", file.write)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def try_local(folder: Path, every: int = 1, first: int = 1) -> Outcomes:
    """Every `every`th call to the operating system fails in turn, in every way."""
    outcomes: Outcomes = Counter()
    reference, calls = _undisturbed(str(folder / "whole"), lambda: Disk())
    for fault in LOCAL_FAULTS:
        for nth in range(first, len(calls) + 1, every):
            if fault == "half" and calls[nth - 1] != "write":
                continue
            disk = Disk(fault, nth)
            with pytest.MonkeyPatch.context() as patch:
                disk.install(patch)
                failure = _train(str(folder / f"{fault}-{nth}"))
            found = _judge(str(folder / f"{fault}-{nth}"), failure, reference)
            outcomes[disk.hit or "not reached", fault, found] += 1
    return outcomes


def try_gcs(server: Proxy, folder: Path, every: int = 1, first: int = 1) -> Outcomes:
    """Every `every`th request to the emulator fails in turn, in every way: twice, or from then on for good."""
    outcomes: Outcomes = Counter()
    reference, _ = _undisturbed(str(folder / "whole"), lambda: Disk())
    server.requests.clear()
    assert _train(f"gs://{BUCKET}/whole") is None
    total = len(server.requests)
    for fault in GCS_FAULTS:
        for lasting in (False, True):
            for nth in range(first, total + 1, every):
                url = f"gs://{BUCKET}/{fault}-{lasting}-{nth}"
                seen: list[Request] = []

                def strike(
                    request: Request,
                    nth: int = nth,
                    fault: str = fault,
                    lasting: bool = lasting,
                    seen: list[Request] = seen,
                ) -> str | None:
                    seen.append(request)
                    return fault if len(seen) >= nth and (lasting or len(seen) < nth + 2) else None

                server.fault = strike
                with pytest.MonkeyPatch.context() as patch:
                    if fault == "stall":
                        patch.setattr(gcs, "_SILENCE_SECONDS", SILENCE_SECONDS)
                    failure = _train(url)
                server.fault = lambda request: None
                call = seen[nth - 1].call if len(seen) >= nth else "not reached"
                kind = f"{fault} {'for good' if lasting else 'twice'}"
                outcomes[call, kind, _judge(url, failure, reference)] += 1
    return outcomes


def _undisturbed(url: str, disk: Callable[[], Disk]) -> tuple[Saved, list[str]]:
    counting = disk()
    with pytest.MonkeyPatch.context() as patch:
        counting.install(patch)
        assert _train(url) is None
    return read_saved(url), counting.calls


def _train(url: str) -> StoreError | None:
    try:
        execute(with_run(SPEC, store=url))
    except StoreError as error:
        return error
    return None


def _judge(url: str, failure: StoreError | None, reference: Saved) -> str:
    """ "unnoticed" or "stopped, then right"; anything else is a fault."""
    faults = []
    store = open_store(url)
    for name in store.list():
        if "spec.json" not in store.list(name):
            continue  # it failed before there was a run
        run, _ = read_run(store, name)
        faults += list(verify_run(run))
        newest, steps = run.newest_state(), run.state_steps()
        if (newest[0] if newest else None) != max(steps, default=None):
            faults.append("the newest state is not intact")
        if failure is None and run.manifest.status() != "complete":
            faults.append("no error, and not complete")
    again = _train(url)
    if again is not None:
        faults.append(f"a second run failed: {again}")
    else:
        faults += differences(reference, read_saved(url))
    if faults:
        return "FAULT: " + "; ".join(faults)
    return "stopped, then right" if failure else "unnoticed"


def print_table(outcomes: Outcomes) -> int:
    """Print calls x faults x outcomes; returns how many are faults."""
    for (call, fault, outcome), count in sorted(outcomes.items()):
        print(f"{call:12} {fault:16} {count:4}  {outcome}")
    bad = sum(count for (_, _, outcome), count in outcomes.items() if outcome.startswith("FAULT"))
    print(f"{outcomes.total()} trials, {bad} faults\n")
    return bad


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0 when there is no fault, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.storage", description="Fail every storage call in turn."
    )
    parser.add_argument("--every", type=int, default=1, help="try every Nth call only")
    parser.add_argument("--store", choices=("local", "gcs"), action="append", help="default: both")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        for kind in options.store or ("local", "gcs"):
            folder = Path(temporary) / kind
            folder.mkdir()
            print(kind)
            if kind == "local":
                bad += print_table(try_local(folder, options.every))
            else:
                with (
                    pytest.MonkeyPatch.context() as patch,
                    emulator(folder) as target,
                    behind_proxy(target, patch) as server,
                ):
                    bad += print_table(try_gcs(server, folder, options.every))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
