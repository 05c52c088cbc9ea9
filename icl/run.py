"""`python -m icl.run SPEC`: train one run, from wherever it was left, and say how it ended in one JSON line."""

import argparse
import logging
import shutil
import sys
from pathlib import Path

import orjson

from icl.attempt import attempt, guarded
from icl.backends import require_obeyed
from icl.core.estimate import check_fits, estimate, format_bytes
from icl.core.plan import build_plan
from icl.core.spec import Spec
from icl.core.words import counted
from icl.exit_codes import ExitCode, describe_exit_codes
from icl.io.codec import decode_json, encode_spec, in_file, load_spec, spec_from_data, with_run
from icl.io.location import is_local, resolve_location
from icl.io.names import run_name
from icl.io.overrides import assigned, parse_assignments, read_parameters
from icl.io.reference import fields_reference
from icl.io.schema import spec_json_schema
from icl.machine import allowed_memory, limit_spinning
from icl.stopping import StopRequest


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded(lambda: _do(arguments))


def _do(arguments: list[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.schema:
        _print_json(spec_json_schema())
        return 0
    if options.fields:
        print(fields_reference(), end="")
        return 0
    if options.spec is None:
        parser.error("the following arguments are required: SPEC")
    spec = with_run(_spec(options), backend=options.backend, store=options.store)
    if options.name:
        print(run_name(spec))
        return 0
    if options.check:
        return _check(spec)
    with StopRequest(spec.run.grace_seconds, spec.run.watchdog_seconds) as should_stop:
        return _train(spec, options.allow_backend_change, options.profile, should_stop)


def _spec(options: argparse.Namespace) -> Spec:
    """The spec in the file, with the fields that the command line sets."""
    values = parse_assignments(options.set)
    for path in options.set_from:
        values = in_file(path, lambda data: read_parameters(decode_json(data))) | values
    if not values:
        return load_spec(options.spec)

    def decode(data: bytes) -> Spec:
        plain = decode_json(data)
        return spec_from_data(assigned(plain, values) if isinstance(plain, dict) else plain)

    return in_file(options.spec, decode)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m icl.run",
        description="Train one run and keep its checkpoints and metrics; run again to go on.",
        epilog=describe_exit_codes(*(code for code in ExitCode if code is not ExitCode.INCOMPLETE)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "spec", metavar="SPEC", nargs="?", help="a JSON file; --fields lists its fields, as docs/spec.md does"
    )
    parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[], help="as in task.num_tasks=8")
    parser.add_argument(
        "--set-from", metavar="FILE", action="append", default=[], help="fields to set, as a W&B agent hands them over"
    )
    parser.add_argument("--backend", metavar="NAME", help="override run.backend")
    parser.add_argument("--store", metavar="URL", help="override run.store")
    parser.add_argument(
        "--allow-backend-change",
        action="store_true",
        help="go on from a state computed elsewhere; the bits will differ",
    )
    parser.add_argument(
        "--profile",
        metavar="DIR",
        nargs="?",
        const="",
        help="print what each phase cost; with DIR also record a few chunks there for TensorBoard or Perfetto",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="print the whole resolved spec and train nothing")
    action.add_argument("--name", action="store_true", help="print the run's name and train nothing")
    action.add_argument(
        "--fields", action="store_true", help="print what each field accepts, its default and its meaning"
    )
    action.add_argument("--schema", action="store_true", help="print the JSON Schema of a spec, for editors")
    return parser


def _check(spec: Spec) -> int:
    require_obeyed(spec.run.backend, spec.training.matmul_precision)
    location = resolve_location(spec.run.store)
    check_fits(spec, allowed_memory())
    plan, needed = build_plan(spec), estimate(spec)
    checkpoints = counted(len(plan.checkpoint), "distinct checkpoint")
    evaluations = counted(len(plan.evaluate), "distinct evaluation")
    vectors = len(plan.checkpoint) + 2 * (1 + len(spec.training.optimizer.leaves))  # two states to resume from
    disk, free = 4 * needed.parameters * vectors, _free_bytes(location)
    _print_json(orjson.loads(encode_spec(spec)))
    print(
        f"{run_name(spec)}: {counted(spec.training.total_steps, 'step')}, {checkpoints}, {evaluations}\n"
        f"{counted(needed.parameters, 'parameter')}; at least {needed.describe()}; {format_bytes(disk)} of storage "
        f"without metrics{'' if free is None else f', of {format_bytes(free)} that are free'}\n"
        f"backend {spec.run.backend} is known; whether this machine has it is not looked for",
        file=sys.stderr,
    )
    if free is not None and disk > free:
        print(
            f"warning: run.store: got {format_bytes(free)} free in {location}; expected {format_bytes(disk)}, which "
            "the checkpoints and states of the whole run take. Choose another store, or ask for fewer checkpoints "
            "(run.checkpoint_at).",
            file=sys.stderr,
        )
    return 0


def _free_bytes(location: str) -> int | None:
    """Bytes free where a local store is or would be made; None for another store, or where that is not told."""
    if not is_local(location):
        return None
    folder = Path(location)
    try:
        return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
    except OSError:
        return None


def _print_json(data: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")


def _train(spec: Spec, allow_backend_change: bool, profile: str | None, should_stop: StopRequest) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    limit_spinning()
    # Imported here so that --name and --check need no torch.
    from tqdm.contrib.logging import logging_redirect_tqdm

    from icl.profiling import format_profile
    from icl.progress import progress_bar

    total = spec.training.total_steps
    with logging_redirect_tqdm(), progress_bar(total, leave=False) as progress:
        ending = attempt(
            spec,
            allow_backend_change=allow_backend_change,
            should_stop=should_stop,
            progress=progress,
            trace=profile or None,
        )
    if profile is not None and ending.error is None:
        print(format_profile(ending.profile) if ending.profile else "nothing was trained", file=sys.stderr)
    if ending.status != "failed":
        print(orjson.dumps(ending.line()).decode(), flush=True)
    if ending.error is not None:
        print(f"error: {ending.error}", file=sys.stderr)
    elif ending.status == "interrupted":
        print(f"interrupted at step {ending.step} of {total}, state saved: run again to go on", file=sys.stderr)
    return ending.code


if __name__ == "__main__":
    sys.exit(main())
