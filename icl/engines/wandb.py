"""The runs of a sweep handed out by a W&B sweep to one agent for each device here, and for each on other machines.

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
from icl.engines.devices import Device
from icl.engines.wandb_agent import AgentTask
from icl.engines.work import pause_after

logger = logging.getLogger("icl")
_REFRESH_SECONDS = 0.5


@attrs.define
class _Agent:
    """An agent's process on a device."""

    device: Device
    process: subprocess.Popen[bytes] | None = None
    failures: int = 0
    start_at: float | None = 0.0  # on the monotonic clock; None while it runs, or when it is not started again
    note: str = ""

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ask_to_stop(self) -> None:
        """End its stdin, which is one request with a signal that it got itself."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()


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


def run_agents(
    sweep: str,
    devices: Sequence[Device],
    task: Callable[[Device], AgentTask],
    folder: Path,
    *,
    should_stop: Callable[[], bool],
    grace_seconds: float,
    show: Callable[[list[dict[str, Any]]], None],
    keep: Sequence[int] = (),
    max_worker_failures: int = 5,
) -> None:
    """One agent on each device until W&B has no more runs for any, or until asked to stop, every run saved.

    Args:
        sweep: "entity/project/id".
        grace_seconds: how long a run may take to stop, before it is killed.
        show: told what each agent does.
    """

    def begin(device: Device) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "icl.engines.wandb_agent", "agent", "--forward-signals"]
        command += [
            "--term-timeout",
            str(round(grace_seconds)),
            "--max-consecutive-failed-runs",
            str(max_worker_failures),
        ]
        with (folder / f"{device.kind}-{device.id}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, sweep],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,  # where W&B leaves its files
                env={**os.environ, **device.environment(), **task(device).environment(), **_agent_environment()},
                pass_fds=keep,
                start_new_session=True,
            )

    agents = [_Agent(device) for device in devices]
    stop_by = None
    while True:
        for agent in agents:
            _tend(agent, begin, max_worker_failures, stopping=stop_by is not None)
        alive = [agent for agent in agents if agent.is_alive]
        show(
            [
                {
                    "device": str(agent.device),
                    "pid": agent.process and agent.process.pid,
                    "run": None,
                    "note": agent.note or "W&B agent",
                }
                for agent in agents
            ]
        )
        ended = (agent.start_at is None and (agent.process is None or stop_by is not None) for agent in agents)
        if not alive and all(ended):
            break
        if should_stop() and stop_by is None:
            stop_by = time.monotonic() + grace_seconds
            for agent in alive:
                agent.ask_to_stop()
        if stop_by is not None and time.monotonic() > stop_by:
            for agent in alive:
                assert agent.process is not None
                with suppress(ProcessLookupError):
                    os.killpg(agent.process.pid, signal.SIGKILL)
        time.sleep(_REFRESH_SECONDS)
    for agent in agents:
        agent.ask_to_stop()


def _tend(agent: _Agent, begin: Callable[[Device], subprocess.Popen[bytes]], most: int, *, stopping: bool) -> None:
    """Start an agent, and one that died again, after a pause; one that ended well has nothing left to do."""
    if agent.is_alive:
        return
    if stopping:
        agent.start_at = None
    elif agent.start_at is None and agent.process is not None:
        agent.ask_to_stop()
        code, agent.process = agent.process.wait(), None
        if code == 0:
            agent.note = "no more runs"
        else:
            _fail(agent, f"the agent ended with exit code {code}", most)
    elif agent.start_at is not None and time.monotonic() >= agent.start_at:
        try:
            agent.process, agent.start_at, agent.note = begin(agent.device), None, ""
        except OSError as error:
            _fail(agent, f"the agent did not start ({error})", most)


def _fail(agent: _Agent, note: str, most: int) -> None:
    agent.failures, agent.note = agent.failures + 1, note
    agent.start_at = time.monotonic() + pause_after(agent.failures)
    if agent.failures >= most:
        agent.start_at = None
        logger.error("%s: %s, %d times in a row", agent.device, note, agent.failures)


def _agent_environment() -> dict[str, str]:
    """An agent does not give up after early failures: who fails is decided by attempts, which are counted here."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # whose `python` is this one
    return {"PATH": path, "WANDB_AGENT_DISABLE_FLAPPING": "true", "WANDB_AGENT_MAX_INITIAL_FAILURES": "1000000"}
