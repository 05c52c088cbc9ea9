"""What W&B's own agent is made to run here.

`python -m icl.engines.wandb_agent agent SWEEP ...` is `wandb agent` that stops when its stdin ends, so that nothing is
left behind; `... run ARGS.json` trains the run that the agent was given. Where the sweep file and the store are, and on
which device, is in the environment, since it may differ from machine to machine.
"""

import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress

import attrs
import orjson

from icl.attempt import attempt, guarded
from icl.core.errors import SpecError
from icl.core.spec import WandbSpec
from icl.engines.devices import Device
from icl.exit_codes import ExitCode
from icl.io.codec import with_run
from icl.io.manifest import Manifest, saved_steps
from icl.io.store import open_store
from icl.io.sweepfile import Member, load_sweep
from icl.stopping import StopRequest

logger = logging.getLogger("icl")


@attrs.frozen
class AgentTask:
    """What an agent's runs have to know; passed on as environment variables."""

    file: str
    store: str
    device: Device
    max_attempts: int
    allow_backend_change: bool = False

    def environment(self) -> dict[str, str]:
        """The variables, for `from_environment`."""
        return {
            "ICL_SWEEP_FILE": self.file,
            "ICL_SWEEP_STORE": self.store,
            "ICL_WORKER": str(self.device),
            "ICL_MAX_ATTEMPTS": str(self.max_attempts),
            "ICL_ALLOW_BACKEND_CHANGE": str(int(self.allow_backend_change)),
        }

    @classmethod
    def from_environment(cls) -> "AgentTask":
        """The task of this process."""
        kind, _, number = os.environ["ICL_WORKER"].partition(":")
        device = Device(kind, number)
        attempts, allow = int(os.environ["ICL_MAX_ATTEMPTS"]), os.environ["ICL_ALLOW_BACKEND_CHANGE"] == "1"
        return cls(os.environ["ICL_SWEEP_FILE"], os.environ["ICL_SWEEP_STORE"], device, attempts, allow)


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit code."""
    if arguments[0] == "agent":
        from wandb.cli.cli import cli

        received, wakeup = socket.socketpair()
        received.setblocking(False)
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_stop_at_end_of_stdin, args=(received,), daemon=True).start()
        cli.main(arguments, prog_name="wandb", standalone_mode=False)
        return 0
    return guarded(lambda: _run(arguments[1], AgentTask.from_environment()))


def _stop_at_end_of_stdin(received: socket.socket) -> None:
    """Have the end of stdin be SIGTERM, unless that has come already: a second one would end the run at once."""
    while os.read(0, 1):  # not sys.stdin, whose lock a thread that waits would hold when the interpreter ends
        pass
    numbers = b""
    with suppress(BlockingIOError):
        numbers = received.recv(4096)
    if not {signal.SIGTERM, signal.SIGINT} & set(numbers):
        os.kill(os.getpid(), signal.SIGTERM)


def _run(args_file: str, task: AgentTask) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    member = _member(args_file, task)
    if _is_stuck(member, task):
        logger.error("%s: %d attempts in a row got no further; not tried again", member.name, task.max_attempts)
        return ExitCode.INCOMPLETE
    run = member.spec.run
    spec = with_run(member.spec, backend=task.device.backend(run.backend), wandb=run.wandb or WandbSpec())
    logger.info("%s: started", member.name)
    with StopRequest(run.grace_seconds, run.watchdog_seconds) as should_stop:
        ending = attempt(spec, allow_backend_change=task.allow_backend_change, should_stop=should_stop)
    logger.info("%s: %s%s", ending.run, ending.status, f": {ending.error}" if ending.error else "")
    return ending.code


def _member(args_file: str, task: AgentTask) -> Member:
    """The run that the agent names; the keys that W&B adds for itself do not matter."""
    with open(args_file, "rb") as file:
        name = orjson.loads(file.read()).get("run")
    members = {member.name: member for member in load_sweep(task.file, store=task.store).members}
    if name not in members:
        raise SpecError(
            f"{task.file}: got a W&B sweep that asks for {name!r}; expected a run of this file. Use the file that it "
            "was registered from."
        )
    return members[name]


def _is_stuck(member: Member, task: AgentTask) -> bool:
    store = open_store(task.store)
    newest = max(saved_steps(store, member.name, "state"), default=0)
    starts = [attempt["from_step"] for attempt in Manifest(store, member.name).attempts()]
    return starts.count(newest) >= task.max_attempts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
