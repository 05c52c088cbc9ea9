"""A sweep that is trained by one engine or another; each says where the runs stand at the end."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from icl.core.errors import SpecError
from icl.core.spec import WandbSpec
from icl.engines.devices import Device, Kind, backend_on, default_devices, default_kind, held, parse_devices
from icl.engines.local import LocalEngine
from icl.engines.pace import Ticks, describe_pace, steps_per_second, with_tick
from icl.engines.ray import run_on_ray
from icl.engines.wandb import register_sweep, run_agents
from icl.engines.wandb_agent import AgentTask
from icl.engines.work import Work, count_words, steps_left
from icl.io.place import place_of
from icl.io.states import RunState, run_states
from icl.io.store import Store
from icl.io.sweepfile import Sweep

_MORE_SECONDS = 5.0  # than a run may take to stop, for its worker
_LOOK_SECONDS = 5.0  # between two looks into the store, some requests a run
_SAVED_SECONDS = 600.0  # over which the pace of what is saved is told: states are saved now and then
logger = logging.getLogger("icl")


@attrs.frozen
class SweepTraining:
    """A sweep that is to be trained, by one engine or another; each says where the runs stand at the end."""

    sweep: Sweep
    store: Store
    folder: Path
    should_stop: Callable[[], bool]
    show: Callable[[dict[str, Any]], None]
    devices: str | None
    retry_failed: bool
    max_attempts: int
    max_worker_failures: int
    allow_backend_change: bool

    def here(self) -> list[RunState]:
        """On the devices of this machine."""
        devices = self._devices()
        with held(devices) as keep:
            work = self._work()
            engine = LocalEngine(
                work,
                devices,
                self.folder,
                keep=keep,
                allow_backend_change=self.allow_backend_change,
                max_worker_failures=self.max_worker_failures,
            )
            engine.run(self.should_stop, grace_seconds(self.sweep), self.show)
            return work.states()

    def on_ray(self, address: str | None) -> list[RunState]:
        """On a Ray cluster."""
        kinds: dict[str, Kind] = {"cpu": "cpu", "cuda": "cuda", "tpu": "tpu"}
        given = self.devices or default_kind(_backend_of(self.sweep))
        if given not in kinds:
            raise SpecError(
                f"--devices: got {given!r}; expected cpu, cuda or tpu with --engine ray, one for each task."
            )
        self._check_backends(kinds[given])
        work, pace = self._work(), _SavedPace()
        run_on_ray(
            work,
            kinds[given],
            address=address,
            should_stop=self.should_stop,
            grace_seconds=grace_seconds(self.sweep),
            show=lambda status: self.show({**status, "pace": pace.of(work.states())}),
            allow_backend_change=self.allow_backend_change,
        )
        return work.states()

    def on_wandb(self, file: str, joined: str | None) -> list[RunState]:
        """By W&B's agents on the devices of this machine; what they leave undone is registered once more.

        Args:
            file: the sweep's, which agents read.
            joined: a W&B sweep that another machine has registered.
        """
        devices, retry_failed = self._devices(), self.retry_failed

        def task(device: Device) -> AgentTask:
            place = place_of(self.store.url)
            return AgentTask(os.path.abspath(file), place, device, self.max_attempts, self.allow_backend_change)

        def looked() -> Iterator[dict[str, Any]]:
            """How many runs are in which state, and how fast it goes, read from the store every few seconds."""
            pace = _SavedPace()
            while True:
                states, read_at = self._states(), time.monotonic()
                found = {"counts": count_words(states), "pace": pace.of(states)}
                while time.monotonic() < read_at + _LOOK_SECONDS:
                    yield found

        looks = looked()

        def show(workers: list[dict[str, Any]]) -> None:
            self.show({**next(looks), "workers": workers})

        with held(devices) as keep:
            for _ in range(self.max_attempts):
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
                    self.folder,
                    should_stop=self.should_stop,
                    grace_seconds=grace_seconds(self.sweep),
                    show=show,
                    keep=keep,
                    max_worker_failures=self.max_worker_failures,
                )
                if joined:
                    break
                retry_failed = False
        return self._states()

    def _devices(self) -> list[Device]:
        devices = parse_devices(self.devices) if self.devices else default_devices(_backend_of(self.sweep))
        self._check_backends(devices[0].kind)
        return devices

    def _check_backends(self, kind: Kind) -> None:
        """Say which backend trains where another was named. Raises SpecError when a run asks for one that cannot."""
        for asked in sorted({member.spec.run.backend for member in self.sweep.members}):
            chosen = backend_on(kind, asked)
            if chosen != asked:
                logger.info("--devices %s: training on backend %s, not %s", self.devices, chosen, asked)

    def _work(self) -> Work:
        return Work(
            self.store,
            self.sweep.members,
            self._states(),
            retry_failed=self.retry_failed,
            max_attempts=self.max_attempts,
        )

    def _states(self) -> list[RunState]:
        """Where the runs stand, without looking twice at those that other machines may be training."""
        return run_states(self.store, [(m.name, m.spec) for m in self.sweep.members], pause=lambda seconds: None)


@attrs.define
class _SavedPace:
    """How fast runs go whose workers do not say so, from what is saved of them."""

    _ticks: Ticks = ()

    def of(self, states: Sequence[RunState]) -> dict[str, Any]:
        """The pace after one more look."""
        now = time.monotonic()
        self._ticks = with_tick(self._ticks, now, sum(state.step for state in states), _SAVED_SECONDS)
        return describe_pace(steps_left(states), steps_per_second(self._ticks, now, _SAVED_SECONDS))


def grace_seconds(sweep: Sweep) -> float:
    """How long workers may take to stop: what the runs may, and a little more."""
    return max(member.spec.run.grace_seconds for member in sweep.members) + _MORE_SECONDS


def _backend_of(sweep: Sweep) -> str:
    backends = sorted({member.spec.run.backend for member in sweep.members})
    if len(backends) > 1:
        raise SpecError(f"run.backend: got {', '.join(backends)} in one sweep; expected one, or --devices. Add it.")
    return backends[0]
