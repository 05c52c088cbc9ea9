"""`python -m icl.sweep FILE`: train every run of a sweep on every device here, and say where each stands."""

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from icl.attempt import EXIT_BACKEND, EXIT_SPEC, EXIT_STORE
from icl.core.backend import BackendUnavailableError
from icl.core.spec import SpecError, WandbSpec
from icl.engines.devices import Device, default_devices, default_kind, held, parse_devices
from icl.engines.local import LocalEngine
from icl.engines.ray import run_on_ray
from icl.engines.session import Session, session_of
from icl.engines.table import Table, describe_states
from icl.engines.wandb import register_sweep, run_agents
from icl.engines.wandb_agent import AgentTask
from icl.engines.work import Work, count_words
from icl.io.errors import CheckpointError, StoreError
from icl.io.states import RunState, run_states
from icl.io.store import Store, open_store
from icl.io.sweepfile import Sweep, describe_values, load_sweep
from icl.stopping import EXIT_INTERRUPTED, StopRequest

EXIT_INCOMPLETE = 1
_REFRESH_SECONDS = 0.5
_AFTER_GRACE_SECONDS = 5.0  # beyond what a run may take to stop
logger = logging.getLogger("icl")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    try:
        sweep = load_sweep(options.file, store=options.store)
        store = open_store(_store_of(sweep))
        session = session_of(sweep.name, store.url)
        if options.shard:
            sweep = sweep.shard(*options.shard)
        if options.list:
            return _list(sweep, store)
        if options.attach:
            return _attach(session)
        if options.stop:
            return _stop(session)
        if options.detach:
            return _detach(session, [argument for argument in given if argument != "--detach"])
        with session.begun():
            return _train(sweep, store, session, options)
    except SpecError as error:
        return _fail(error, EXIT_SPEC)
    except BackendUnavailableError as error:
        return _fail(error, EXIT_BACKEND)
    except (StoreError, CheckpointError) as error:
        return _fail(error, EXIT_STORE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m icl.sweep",
        description="Train every run of a sweep; run again to go on.",
        epilog="Exit codes: 0 all complete, 1 some are not, 2 bad sweep or usage, 3 device unavailable, 4 store fault, "
        "75 interrupted (run again to go on).",
    )
    parser.add_argument("file", metavar="FILE", help="a JSON file: a base spec and axes over its fields")
    parser.add_argument(
        "--engine", choices=("local", "ray", "wandb"), default="local", help="who divides the work: default local"
    )
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


@attrs.frozen
class _Training:
    """A sweep that is to be trained, by one engine or another; each says where the runs stand at the end."""

    sweep: Sweep
    store: Store
    session: Session
    options: argparse.Namespace
    should_stop: Callable[[], bool]
    table: Table

    def here(self) -> list[RunState]:
        """On the devices of this machine."""
        devices = self._devices()
        with held(devices) as keep:
            work = self._work()
            engine = LocalEngine(
                work,
                devices,
                self.session.folder,
                keep=keep,
                allow_backend_change=self.options.allow_backend_change,
                max_worker_failures=self.options.max_worker_failures,
            )
            engine.run(self.should_stop, _grace_seconds(self.sweep), self._show)
            return work.states()

    def on_ray(self) -> list[RunState]:
        """On a Ray cluster."""
        kind = self.options.devices or default_kind(_backend_of(self.sweep))
        if kind not in ("cpu", "cuda", "tpu"):
            raise SpecError(f"--devices: got {kind!r}; expected cpu, cuda or tpu with --engine ray, one for each task.")
        work = self._work()
        run_on_ray(
            work,
            kind,
            address=self.options.ray_address,
            should_stop=self.should_stop,
            grace_seconds=_grace_seconds(self.sweep),
            show=self._show,
            allow_backend_change=self.options.allow_backend_change,
        )
        return work.states()

    def on_wandb(self) -> list[RunState]:
        """By W&B's agents on the devices of this machine; what they leave undone is registered once more."""
        devices, joined = self._devices(), self.options.wandb_sweep
        options = self.options
        retry_failed = options.retry_failed

        def task(device: Device) -> AgentTask:
            return AgentTask(os.path.abspath(options.file), _place(self.store.url), device, options.max_attempts)

        def show(workers: list[dict[str, Any]]) -> None:
            self._show({"counts": count_words(self._states()), "workers": workers})

        with held(devices) as keep:
            for _ in range(options.max_attempts):
                done = ("complete",) if retry_failed else ("complete", "failed")
                left = [state.name for state in self._states() if state.word not in done]
                if not left or self.should_stop():
                    break
                wandb = self.sweep.members[0].spec.run.wandb or WandbSpec()
                queue = joined or register_sweep(wandb, self.sweep.name, left)
                logger.info("W&B sweep %s; other machines join with --engine wandb --wandb-sweep %s", queue, queue)
                run_agents(
                    queue,
                    devices,
                    task,
                    self.session.folder,
                    should_stop=self.should_stop,
                    grace_seconds=_grace_seconds(self.sweep),
                    show=show,
                    keep=keep,
                    max_worker_failures=options.max_worker_failures,
                )
                if joined:
                    break
                retry_failed = False
        return self._states()

    def _devices(self) -> list[Device]:
        if self.options.devices:
            return parse_devices(self.options.devices)
        return default_devices(_backend_of(self.sweep))

    def _work(self) -> Work:
        return Work(
            self.store,
            self.sweep.members,
            self._states(),
            retry_failed=self.options.retry_failed,
            max_attempts=self.options.max_attempts,
        )

    def _states(self) -> list[RunState]:
        """Where the runs stand, without looking twice at those that other machines may be training."""
        return run_states(self.store, [(m.name, m.spec) for m in self.sweep.members], pause=lambda seconds: None)

    def _show(self, status: dict[str, Any]) -> None:
        self.session.write_status(status)
        self.table.show(status)


def _train(sweep: Sweep, store: Store, session: Session, options: argparse.Namespace) -> int:
    with StopRequest(_grace_seconds(sweep) + _AFTER_GRACE_SECONDS) as should_stop:
        training = _Training(sweep, store, session, options, should_stop, Table(sys.stderr))
        logger.info("logs: %s", session.folder)
        engines = {"local": training.here, "ray": training.on_ray, "wandb": training.on_wandb}
        states = engines[options.engine]()
        stopped = should_stop()
    for state in states:
        if state.word == "failed":
            logger.error("%s failed at step %d: %s", state.name, state.step, state.note)
    counts = count_words(states)
    print(", ".join(f"{count} {word}" for word, count in counts.items() if count))
    if counts["complete"] == len(states):
        return 0
    return EXIT_INTERRUPTED if stopped else EXIT_INCOMPLETE


def _grace_seconds(sweep: Sweep) -> float:
    """How long workers may take to stop: what the runs may, and a little more."""
    return max(member.spec.run.grace_seconds for member in sweep.members) + _AFTER_GRACE_SECONDS


def _backend_of(sweep: Sweep) -> str:
    backends = sorted({member.spec.run.backend for member in sweep.members})
    if len(backends) > 1:
        raise SpecError(f"run.backend: got {', '.join(backends)} in one sweep; expected one, or --devices. Add it.")
    return backends[0]


def _list(sweep: Sweep, store: Store) -> int:
    states = run_states(store, [(member.name, member.spec) for member in sweep.members])
    for line in describe_states(states, [describe_values(member.values) for member in sweep.members]):
        print(line)
    return 0 if all(state.word == "complete" for state in states) else EXIT_INCOMPLETE


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
        return EXIT_INTERRUPTED
    if pid is None:
        print("no process runs this sweep here now; --list says where each run stands", file=sys.stderr)
    if status is None:
        return EXIT_INCOMPLETE
    counts = status["counts"]
    return 0 if counts["complete"] == sum(counts.values()) else EXIT_INCOMPLETE


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


def _store_of(sweep: Sweep) -> str:
    stores = sorted({member.spec.run.store for member in sweep.members})
    if len(stores) != 1:
        raise SpecError(f"run.store: got {', '.join(stores)} in one sweep; expected one. Give --store.")
    return stores[0]


def _place(store: str) -> str:
    return store if "://" in store else os.path.abspath(store)


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected I/N with I from 0 to N - 1, as in 0/4")
    return int(match[1]), int(match[2])


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected an integer >= 1")
    return int(text)


def _fail(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
