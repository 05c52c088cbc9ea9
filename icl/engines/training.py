"""What every engine is given, a sweep that is to be trained, and what an engine has to hold to."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import attrs

from icl.core.errors import SpecError
from icl.engines.devices import Device, backend_on, default_devices, parse_devices
from icl.engines.retries import RetryPolicy
from icl.engines.run_queue import RunQueue
from icl.io.states import RunState, run_states
from icl.io.store import Store
from icl.io.sweepfile import Sweep

_MORE_SECONDS = 5.0  # than a run may take to stop, for its worker
logger = logging.getLogger("icl")


@attrs.frozen
class SweepTraining:
    """A sweep that is to be trained, and how.

    `file` is the sweep's, for processes that read it themselves; `folder` is where logs go; `devices` is as
    `parse_devices` reads it, None for those that `run.backend` asks for. `ray_address` and `wandb_sweep` name a Ray
    cluster and a W&B sweep that are there already.
    """

    sweep: Sweep
    store: Store
    file: str
    folder: Path
    devices: str | None
    retries: RetryPolicy
    retry_failed: bool
    allow_backend_change: bool
    ray_address: str | None
    wandb_sweep: str | None

    @property
    def grace_seconds(self) -> float:
        """How long workers may take to stop: what the runs may, and a little more."""
        return max(member.spec.run.grace_seconds for member in self.sweep.members) + _MORE_SECONDS

    @property
    def backend(self) -> str:
        """The backend that every run asks for. Raises SpecError when they ask for several."""
        backends = self._backends()
        if len(backends) > 1:
            raise SpecError(f"run.backend: got {', '.join(backends)} in one sweep; expected one, or --devices. Add it.")
        return backends[0]

    def devices_here(self) -> list[Device]:
        """The devices of this machine to train on. Raises SpecError when a run's backend cannot run there."""
        devices = parse_devices(self.devices) if self.devices else default_devices(self.backend)
        self.check_backends(devices[0].kind)
        return devices

    def check_backends(self, kind: str) -> None:
        """Say which backend trains where another was named. Raises SpecError when a run asks for one that cannot."""
        for asked in self._backends():
            chosen = backend_on(kind, asked)
            if chosen != asked:
                logger.info("--devices %s: training on backend %s, not %s", self.devices, chosen, asked)

    def states(self) -> list[RunState]:
        """Where the runs stand, without looking twice at those that other machines may be training."""
        return run_states(self.store, [(m.name, m.spec) for m in self.sweep.members], pause=lambda seconds: None)

    def queue(self) -> RunQueue:
        """The runs that are still to be trained."""
        return RunQueue(
            self.store, self.sweep.members, self.states(), retries=self.retries, retry_failed=self.retry_failed
        )

    def _backends(self) -> list[str]:
        return sorted({member.spec.run.backend for member in self.sweep.members})


class Engine(Protocol):
    """Trains the runs of a sweep: it decides who trains what when, and nothing else.

    Laws: it returns when no run is left that it may train, when no device takes any more, or when `should_stop()` is
    true; then every run under way is saved, or after `training.grace_seconds` its process is killed. No process that it
    started is left behind. What it returns is where each run stands, in the order of the sweep. Which runs are done is
    read from the store, never from a memory of its own, so that any engine goes on where another left off. A run that
    fails is tried again as `training.retries` says. What comes out is the same with every engine, since a run is a
    function of its spec.
    """

    def __call__(
        self, training: SweepTraining, should_stop: Callable[[], bool], show: Callable[[dict[str, Any]], None]
    ) -> list[RunState]:
        """Train, showing every now and then a status in plain data: `counts`, `pace` and `workers`.

        Raises: BackendUnavailableError when devices, or what the engine needs, are not there; SpecError for options
            that do not fit the sweep.
        """
