"""`python -m icl.store ls|show|verify URL [RUN]`: what a store holds, and whether it is intact."""

import argparse
import sys
from typing import Any

import orjson

from icl.core.spec import SpecError
from icl.io.codec import spec_to_data
from icl.io.errors import CheckpointError, StoreError
from icl.io.rundir import RunDir, list_runs, read_run
from icl.io.store import Store, open_store
from icl.io.verify import verify_run

EXIT_USAGE, EXIT_FAULT = 2, 4


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        store = open_store(options.url, create=False)
        if options.command == "ls":
            return _list(store, options.json)
        if options.command == "show":
            return _show(store, options.run)
        return _verify(store, options.run)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (StoreError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAULT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m icl.store",
        description="Look into a store of runs.",
        epilog="Exit codes: 0 all well, 2 usage, 4 store or checkpoint fault.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    ls = commands.add_parser("ls", help="list the runs with their status and step")
    ls.add_argument("--json", action="store_true", help="one JSON line a run")
    show = commands.add_parser("show", help="print one run's spec, saved steps and attempts as JSON")
    verify = commands.add_parser("verify", help="recompute every digest and look for gaps, strays and contradictions")
    for command in (ls, show, verify):
        command.add_argument("url", metavar="URL", help="a local path or any fsspec URL")
    show.add_argument("run", metavar="RUN")
    verify.add_argument("run", metavar="RUN", nargs="?", help="one run; without it, all of them")
    return parser


def _list(store: Store, as_json: bool) -> int:
    runs = list_runs(store)
    width = max((len(run.name) for run in runs), default=0)
    for run in runs:
        line = {"run": run.name, "status": run.status, "step": run.step}
        print(orjson.dumps(line).decode() if as_json else f"{run.name:{width}}  {run.status:10}  {run.step:>9}")
    return 0


def _show(store: Store, name: str) -> int:
    run, spec = read_run(store, name)
    shown: dict[str, Any] = {
        "run": run.name,
        "status": run.status(),
        "checkpoints": run.checkpoint_steps(),
        "states": run.state_steps(),
        "attempts": run.attempts(),
        "spec": spec_to_data(spec),
    }
    sys.stdout.buffer.write(orjson.dumps(shown, option=orjson.OPT_INDENT_2) + b"\n")
    return 0


def _verify(store: Store, name: str | None) -> int:
    there = [run.name for run in list_runs(store)]
    if name and name not in there:
        read_run(store, name)  # says what is wrong with the name
    faults = 0
    for each in [name] if name else there:
        run = RunDir(store, each)  # not read_run: a damaged spec is a fault to report, not the end
        found = list(verify_run(run))
        faults += len(found)
        print(f"{each}: {'intact' if not found else f'{len(found)} faults'}, {len(run.checkpoint_steps())} checkpoints")
        for fault in found:
            print(f"  {fault}")
    return EXIT_FAULT if faults else 0


if __name__ == "__main__":
    sys.exit(main())
