"""`python -m icl.store ls|show|verify|export|import URL ...`: what a store holds, whether it is intact, and copies."""

import argparse
import sys
from typing import Any

import orjson

from icl.attempt import guarded
from icl.core.errors import SpecError
from icl.exit_codes import ExitCode, describe_exit_codes
from icl.io.codec import spec_to_data
from icl.io.location import resolve_location
from icl.io.lookup import find_run
from icl.io.manifest import Manifest, list_runs, read_spec, saved_steps
from icl.io.store import Store, open_store


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    return guarded(lambda: _do(options))


def _do(options: argparse.Namespace) -> int:
    store = open_store(options.url, create=options.command == "import")
    if options.command == "ls":
        return _list(store, options.json)
    if options.command == "show":
        return _show(store, find_run(store, options.run))
    if options.command == "verify":
        return _verify(store, [find_run(store, options.run)] if options.run else [run.name for run in list_runs(store)])
    if options.command == "export":
        return _export(store, find_run(store, options.run), options.destination, options.format, options.step)
    return _import(store, options.source)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m icl.store",
        description="Look into a store of runs.",
        epilog=describe_exit_codes(ExitCode.COMPLETE, ExitCode.SPEC, ExitCode.STORE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    ls = commands.add_parser("ls", help="list the runs with their status and step")
    ls.add_argument("--json", action="store_true", help="one JSON line a run")
    show = commands.add_parser("show", help="print one run's spec, saved steps and attempts as JSON")
    verify = commands.add_parser("verify", help="recompute every digest and look for gaps, strays and contradictions")
    export = commands.add_parser("export", help="copy one run, or its checkpoints in an earlier public format")
    bring = commands.add_parser("import", help="publish a folder that export wrote, or others in the same layout")
    for command in (ls, show, verify, export, bring):
        command.add_argument("url", metavar="URL", help="a local path or any fsspec URL")
    show.add_argument("run", metavar="RUN", help="its name, or enough of the beginning of its name or hash")
    verify.add_argument("run", metavar="RUN", nargs="?", help="one run; without it, all of them")
    export.add_argument("run", metavar="RUN", help="as for show")
    export.add_argument("destination", metavar="DEST", help="where to make the folder RUN: a path or an fsspec URL")
    export.add_argument(
        "--format",
        choices=("icl", "timaeus", "raventos"),
        default="icl",
        help="icl: the whole run, verified; timaeus: torch.save state dicts; raventos: .npz arrays",
    )
    export.add_argument("--step", type=int, action="append", default=[], help="only this checkpoint; may be repeated")
    bring.add_argument("source", metavar="SOURCE", help="the folder: a path or an fsspec URL")
    return parser


def _list(store: Store, as_json: bool) -> int:
    runs = list_runs(store)
    width = max((len(run.name) for run in runs), default=0)
    for run in runs:
        line = {"run": run.name, "status": run.status, "step": run.step}
        _print(orjson.dumps(line).decode() if as_json else f"{run.name:{width}}  {run.status:10}  {run.step:>9}")
    return 0


def _show(store: Store, name: str) -> int:
    spec, manifest = read_spec(store, name), Manifest(store, name)
    shown: dict[str, Any] = {
        "run": name,
        "status": manifest.status(),
        "checkpoints": saved_steps(store, name, "checkpoints"),
        "states": saved_steps(store, name, "state"),
        "attempts": manifest.attempts(),
        "spec": spec_to_data(spec),
    }
    sys.stdout.buffer.write(orjson.dumps(shown, option=orjson.OPT_INDENT_2) + b"\n")
    return 0


def _export(store: Store, name: str, destination: str, form: str, steps: list[int]) -> int:
    # What reads tensors is imported where it is used, so that ls and show need no torch.
    from icl.io.exchange import copy_run, export_checkpoints
    from icl.io.rundir import read_run

    run, spec = read_run(store, name)
    if form not in ("icl", spec.model.architecture):
        raise SpecError(f"--format: got {form}; expected icl or {spec.model.architecture}, the run's architecture.")
    if form == "icl" and steps:
        raise SpecError("--step: got a step; expected none with --format icl, which copies the whole run.")
    target = open_store(destination)
    if form == "icl":
        _print(f"{name}: {copy_run(run, target)} objects in {destination}/{name}")
    else:
        _print(f"{name}: {export_checkpoints(run, spec, target, steps)} checkpoints in {destination}/{name}")
    return 0


def _import(store: Store, url: str) -> int:
    from icl.io.exchange import copy_run, import_checkpoints, is_run_folder
    from icl.io.rundir import read_run

    source = open_store(url, create=False)
    if is_run_folder(source):
        parent, _, name = resolve_location(url).rpartition("/")
        run, _ = read_run(open_store(parent or "/", create=False), name)
        _print(f"{name}: {copy_run(run, store)} objects in {store.url}")
    else:
        run, count = import_checkpoints(source, store)
        _print(f"{run.name}: {count} checkpoints in {store.url}")
    return 0


def _verify(store: Store, names: list[str]) -> int:
    from icl.io.rundir import RunDir
    from icl.io.verify import verify_run

    faults = 0
    for name in names:
        run = RunDir(store, name)  # not its spec: a damaged spec is a fault to report, not the end
        found = list(verify_run(run))
        faults += len(found)
        saved = _count(len(run.checkpoint_steps()), "checkpoint")
        _print(f"{name}: {_count(len(found), 'fault')}" if found else f"{name}: intact, {saved}")
        for fault in found:
            _print(f"  {fault}")
    return ExitCode.STORE if faults else ExitCode.COMPLETE


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _print(text: str) -> None:
    """Print with a backslash code for what a terminal may not show, such as a file's name that is not UTF-8."""
    shown = (char if char.isascii() and char.isprintable() else ascii(char)[1:-1] for char in text)
    print("".join(shown))


if __name__ == "__main__":
    sys.exit(main())
