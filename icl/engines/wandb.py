"""The engine that has a W&B sweep hand out the runs: one agent for each device here, and for each on other machines.

W&B is the queue: it gives each run to one agent, and one that was preempted to another. What is done is still read from
the store, and a run that W&B thinks finished but is not is registered again.
"""

import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import attrs

from icl.core.errors import BackendUnavailableError
from icl.core.spec import WandbSpec
from icl.engines.devices import Device, reserved
from icl.engines.pace import SavedPace
from icl.engines.retries import RetryPolicy
from icl.engines.run_queue import count_statuses, steps_left
from icl.engines.training import SweepTraining
from icl.engines.wandb_agent import AgentTask
from icl.io.location import resolve_location
from icl.io.states import RunState

logger = logging.getLogger("icl")
_REFRESH_SECONDS = 0.5
_READ_SECONDS = 5.0  # between two readings of the store, some requests a run


def train_by_wandb(
    training: SweepTraining, should_stop: Callable[[], bool], show: Callable[[dict[str, Any]], None]
) -> list[RunState]:
    """An `Engine`: W&B's agents, on the devices of this machine. What they leave undone is registered once more.

    With `training.wandb_sweep`, which another machine has registered, the agents take the runs of that one.
    """
    devices, progress = training.devices_here(), _Progress(training)
    done = ("complete",) if training.retry_failed else ("complete", "failed")
    with reserved(devices) as keep:
        for _ in range(training.retries.max_attempts):
            left = [state.name for state in training.states() if state.status not in done]
            if not left or should_stop():
                break
            wandb = training.sweep.members[0].spec.run.wandb or WandbSpec()
            queue = training.wandb_sweep or register_sweep(wandb, training.sweep.name, left)
            logger.info("W&B sweep %s; other machines join with --engine wandb --wandb-sweep %s", queue, queue)
            agents = [_Agent(device, _agent_command(queue, device, training, keep)) for device in devices]
            _run_agents(agents, training, should_stop, lambda workers: show({**progress.read(), "workers": workers}))
            if training.wandb_sweep:
                break
            done = ("complete", "failed")
    return training.states()


def register_sweep(wandb_spec: WandbSpec, name: str, runs: Sequence[str]) -> str:
    """A new W&B sweep over those runs, as "entity/project/id".

    Raises: BackendUnavailableError when W&B does not take it.
    """
    try:
        import wandb
    except ImportError as error:
        raise BackendUnavailableError(
            f"engine wandb: got no wandb ({error}); expected it. In the clone: pip install -e '.[wandb]'."
        ) from None
    config = {
        "name": name,
        "method": "grid",
        "program": "icl.engines.wandb_agent",
        "parameters": {"run": {"values": list(runs)}},
        "command": ["${env}", "${interpreter}", "-m", "icl.engines.wandb_agent", "run", "${args_json_file}"],
    }
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of its own parts
            sweep = wandb.sweep(config, entity=wandb_spec.entity, project=wandb_spec.project)
        entity = wandb_spec.entity or wandb.Api().default_entity
    except Exception as error:  # whatever the client raises
        raise BackendUnavailableError(
            f"engine wandb: got {type(error).__name__}: {error}; expected W&B to take a sweep. Log in with "
            "`wandb login`, or use --engine local."
        ) from None
    return f"{entity}/{wandb_spec.project}/{sweep}"


@attrs.define
class _Progress:
    """How many runs have which status, and how fast it goes, read from the store every few seconds."""

    training: SweepTraining
    pace: SavedPace = attrs.field(factory=SavedPace)
    next_at: float = 0.0  # on the monotonic clock
    found: dict[str, Any] = attrs.field(factory=dict)

    def read(self) -> dict[str, Any]:
        if time.monotonic() >= self.next_at:
            states, now = self.training.states(), time.monotonic()
            pace = self.pace.describe(now, sum(state.step for state in states), steps_left(states))
            self.found, self.next_at = {"counts": count_statuses(states), "pace": pace}, now + _READ_SECONDS
        return self.found


@attrs.define
class _Agent:
    """An agent's process on a device."""

    device: Device
    start: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes] | None = None
    failures: int = 0  # in a row
    start_at: float | None = 0.0  # on the monotonic clock; None while it runs, or when it is not started again
    note: str = ""

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def keep_alive(self, retries: RetryPolicy) -> None:
        """Start the agent, and one that died again, after a pause; one that ended well has nothing left to do."""
        if self.is_alive:
            return
        if self.process is not None:
            self.ask_to_stop()
            code, self.process = self.process.wait(), None
            if code == 0:
                self.note = "no more runs"
            else:
                self._fail(f"the agent ended with exit code {code}", retries)
        elif self.start_at is not None and time.monotonic() >= self.start_at:
            try:
                self.process, self.start_at, self.note = self.start(), None, ""
            except OSError as error:
                self._fail(f"the agent did not start ({error})", retries)

    def ask_to_stop(self) -> None:
        """End its stdin, which is one request with a signal that it got itself."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def kill(self) -> None:
        """End the agent and whatever it started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def describe(self) -> dict[str, Any]:
        """What it does, as plain data."""
        pid = self.process and self.process.pid
        return {"device": str(self.device), "pid": pid, "run": None, "note": self.note or "W&B agent"}

    def _fail(self, note: str, retries: RetryPolicy) -> None:
        self.failures, self.note = self.failures + 1, note
        self.start_at = time.monotonic() + retries.pause_after(self.failures)
        if self.failures >= retries.max_worker_failures:
            self.start_at = None
            logger.error("%s: %s, %d times in a row", self.device, note, self.failures)


def _run_agents(
    agents: Sequence[_Agent],
    training: SweepTraining,
    should_stop: Callable[[], bool],
    show: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Keep an agent alive on each device until W&B has no more runs for any; or stop them all, every run saved."""
    kill_at = None
    while True:
        if kill_at is None:
            for agent in agents:
                agent.keep_alive(training.retries)
        alive = [agent for agent in agents if agent.is_alive]
        show([agent.describe() for agent in agents])
        ended = all(agent.process is None and agent.start_at is None for agent in agents)
        if not alive and (ended or kill_at is not None):
            break
        if should_stop() and kill_at is None:
            kill_at = time.monotonic() + training.grace_seconds
            for agent in alive:
                agent.ask_to_stop()
        if kill_at is not None and time.monotonic() > kill_at:
            for agent in alive:
                agent.kill()
        time.sleep(_REFRESH_SECONDS)
    for agent in agents:
        agent.ask_to_stop()


def _agent_command(
    queue: str, device: Device, training: SweepTraining, keep: Sequence[int]
) -> Callable[[], subprocess.Popen[bytes]]:
    """What starts an agent on a device for the W&B sweep "entity/project/id"."""
    task = AgentTask(
        os.path.abspath(training.file),
        resolve_location(training.store.url),
        device,
        training.retries.max_attempts,
        training.allow_backend_change,
    )
    timeout, failures = str(round(training.grace_seconds)), str(training.retries.max_worker_failures)
    command = [sys.executable, "-m", "icl.engines.wandb_agent", "agent", "--forward-signals"]
    command += ["--term-timeout", timeout, "--max-consecutive-failed-runs", failures, queue]
    environment = {**os.environ, **device.environment(), **task.environment(), **_agent_environment()}

    def start() -> subprocess.Popen[bytes]:
        with (training.folder / f"{device.kind}-{device.id}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=training.folder,  # where W&B leaves its files
                env=environment,
                pass_fds=keep,
                start_new_session=True,
            )

    return start


def _agent_environment() -> dict[str, str]:
    """An agent does not give up after early failures: who fails is decided by attempts, which are counted here."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # whose `python` is this one
    return {"PATH": path, "WANDB_AGENT_DISABLE_FLAPPING": "true", "WANDB_AGENT_MAX_INITIAL_FAILURES": "1000000"}
