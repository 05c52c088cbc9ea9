"""`python -m icl.sweep FILE`: train every run of a sweep on every device here, and say where each stands."""

import argparse
import logging
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

from icl.attempt import guarded
from icl.core.errors import SpecError
from icl.core.estimate import check_fits
from icl.engines.registry import ENGINES
from icl.engines.retries import RetryPolicy
from icl.engines.run_queue import count_statuses
from icl.engines.session import Session, session_of
from icl.engines.table import Table, describe_states
from icl.engines.training import SweepTraining
from icl.exit_codes import ExitCode, describe_exit_codes
from icl.io.states import run_states
from icl.io.store import Store, open_store
from icl.io.sweepfile import Sweep, describe_values, load_sweep
from icl.machine import allowed_memory
from icl.stopping import StopRequest

_REFRESH_SECONDS = 0.5
_MOST_FAULTS = 20
_AFTER_GRACE_SECONDS = 5.0  # beyond what a run may take to stop
logger = logging.getLogger("icl")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded(lambda: _do(sys.argv[1:] if arguments is None else arguments))


def _do(given: Sequence[str]) -> int:
    options = _parser().parse_args(given)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    for engine, option in (("ray", "ray_address"), ("wandb", "wandb_sweep")):
        if getattr(options, option) is not None and options.engine != engine:
            raise SpecError(f"--{option.replace('_', '-')}: got it with --engine {options.engine}; expected {engine}.")
    sweep = load_sweep(options.file, store=options.store)
    store = open_store(sweep.store)
    name = sweep.name
    if options.shard:
        sweep = sweep.shard(*options.shard)
        if not sweep.members:
            print("0 runs: there are fewer runs than shards")
            return ExitCode.COMPLETE
    if options.list:
        return _list(sweep, store)
    session = session_of(name, store.url)
    if options.attach:
        return _attach(session)
    if options.stop:
        return _stop(session)
    if options.detach:
        return _detach(session, [argument for argument in given if argument != "--detach"])
    if options.engine != "ray" and not (options.devices or "").startswith(("cuda", "tpu")):
        _require_memory(sweep)
    with session.locked():
        return _train(sweep, store, session, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m icl.sweep",
        description="Train every run of a sweep; run again to go on.",
        epilog=describe_exit_codes(*(code for code in ExitCode if code not in (ExitCode.NON_FINITE, ExitCode.OWNED))),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="a JSON file: a base spec and axes over its fields")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="local", help="who divides the work: default local")
    parser.add_argument(
        "--ray-address", metavar="ADDRESS", help="of the cluster; default RAY_ADDRESS, else a local one"
    )
    parser.add_argument("--wandb-sweep", metavar="ID", help="join this W&B sweep (entity/project/id) of the same file")
    parser.add_argument("--store", metavar="URL", help="override run.store of every run")
    parser.add_argument(
        "--devices",
        metavar="DEVICES",
        help="such as tpu:0-3, cuda:all or cpu:2 (two processes of one thread); default: all that run.backend asks for",
    )
    parser.add_argument("--shard", metavar="I/N", type=_shard, help="only every N-th run from the I-th (from 0) on")
    parser.add_argument("--retry-failed", action="store_true", help="train runs that have failed before, too")
    parser.add_argument(
        "--max-attempts", metavar="N", type=_count, default=5, help="in a row that get a run no further (default 5)"
    )
    parser.add_argument(
        "--max-worker-failures",
        metavar="N",
        type=_count,
        default=5,
        help="in a row, after which a device takes no more runs (default 5)",
    )
    parser.add_argument("--allow-backend-change", action="store_true", help="as in icl.run")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="print every run and its state, from the store alone")
    action.add_argument("--detach", action="store_true", help="go on without this terminal")
    action.add_argument(
        "--attach", action="store_true", help="watch the sweep that runs on this machine; Ctrl-C leaves it"
    )
    action.add_argument("--stop", action="store_true", help="stop it, every run saved")
    return parser


def _train(sweep: Sweep, store: Store, session: Session, options: argparse.Namespace) -> int:
    table = Table(sys.stderr)
    training = SweepTraining(
        sweep=sweep,
        store=store,
        file=options.file,
        folder=session.folder,
        devices=options.devices,
        retries=RetryPolicy(options.max_attempts, options.max_worker_failures),
        retry_failed=options.retry_failed,
        allow_backend_change=options.allow_backend_change,
        ray_address=options.ray_address,
        wandb_sweep=options.wandb_sweep,
    )

    def show(status: dict[str, Any]) -> None:
        session.write_status(status)
        table.show(status)

    with StopRequest(training.grace_seconds + _AFTER_GRACE_SECONDS) as should_stop:
        logger.info("logs: %s", session.folder)
        states = ENGINES[options.engine](training, should_stop, show)
        stopped = should_stop()
    for state in states:
        if state.status == "failed":
            logger.error("%s failed at step %d: %s", state.name, state.step, state.note)
    counts = count_statuses(states)
    print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    if counts["complete"] == len(states):
        return ExitCode.COMPLETE
    return ExitCode.INTERRUPTED if stopped else ExitCode.INCOMPLETE


def _require_memory(sweep: Sweep) -> None:
    """Refuse, before anything is started, what this machine cannot hold; a run on a chip is judged when it begins."""
    available, faults = allowed_memory(), list[str]()
    for member in sweep.members:
        try:
            check_fits(member.spec, available)
        except SpecError as error:
            faults.append(f"{member.name}: {error}")
    if faults:
        raise SpecError(*faults[:_MOST_FAULTS])


def _list(sweep: Sweep, store: Store) -> int:
    states = run_states(store, [(member.name, member.spec) for member in sweep.members])
    for line in describe_states(states, [describe_values(member.values) for member in sweep.members]):
        print(line)
    return 0 if all(state.status == "complete" for state in states) else ExitCode.INCOMPLETE


def _attach(session: Session) -> int:
    """Show the sweep that runs here until it ends."""
    table = Table(sys.stderr)
    pid = session.pid()
    try:
        while (status := session.read_status()) is not None:
            table.show(status)
            if session.pid() is None:
                break
            time.sleep(_REFRESH_SECONDS)
    except KeyboardInterrupt:
        print(f"left: process {pid} goes on; --attach comes back, --stop ends it", file=sys.stderr)
        return ExitCode.INTERRUPTED
    if pid is None:
        print("no process runs this sweep here now; --list says where each run stands", file=sys.stderr)
    if status is None:
        return ExitCode.INCOMPLETE
    counts = status["counts"]
    return 0 if counts["complete"] == sum(counts.values()) else ExitCode.INCOMPLETE


def _stop(session: Session) -> int:
    stopped = session.stop()
    print("stopped, every run saved; run again to go on" if stopped else "no process runs this sweep here")
    return 0


def _detach(session: Session, arguments: Sequence[str]) -> int:
    if session.pid() is not None:
        raise SpecError(
            f"--detach: got a sweep that process {session.pid()} runs here already. Watch it with --attach."
        )
    code = session.detach([sys.executable, "-m", "icl.sweep", *arguments])
    if code is None:
        print(
            f"process {session.pid()} goes on without this terminal: --attach watches it, --stop ends it; {session.log}"
        )
        return 0
    print(f"it has ended with exit code {code}; see {session.log}", file=sys.stderr)
    return code


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected I/N with I from 0 to N - 1, as in 0/4")
    return int(match[1]), int(match[2])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected an integer >= 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
