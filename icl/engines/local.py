"""The engine for this machine: one worker process for each device."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from icl.attempt import Ending
from icl.core.errors import BackendUnavailableError
from icl.engines.devices import Device, reserved
from icl.engines.pace import Ticks, describe_pace, steps_per_second, with_tick
from icl.engines.retries import RetryPolicy, counts_against_device
from icl.engines.run_queue import QueuedRun, RunQueue, count_statuses, steps_left
from icl.engines.training import SweepTraining
from icl.engines.worker import SAME_PROCESS, WorkerProcess
from icl.exit_codes import ExitCode
from icl.io.codec import with_run
from icl.io.states import RunState

logger = logging.getLogger("icl")
_REFRESH_SECONDS = 0.5
_LEAVING_SECONDS = 10.0  # for a worker that has nothing to do any more


@attrs.define
class Slot:
    """A device and what happens on it; read by whoever shows the sweep."""

    device: Device
    log: Path
    run: QueuedRun | None = None
    step: int = 0
    trained: int = 0  # steps of all its runs, those that were computed twice among them
    ticks: Ticks = ()
    failures: int = 0  # in a row
    note: str = ""
    worker: WorkerProcess | None = None


def train_here(
    training: SweepTraining, should_stop: Callable[[], bool], show: Callable[[dict[str, Any]], None]
) -> list[RunState]:
    """An `Engine`: one worker process for each device of this machine that `training.devices` names."""
    devices = training.devices_here()
    with reserved(devices) as keep:
        runs = training.queue()
        pool = WorkerPool(
            runs,
            devices,
            training.folder,
            keep=keep,
            retries=training.retries,
            allow_backend_change=training.allow_backend_change,
        )
        pool.train(should_stop, training.grace_seconds, show)
        return runs.states()


class WorkerPool:
    """One worker process for each device, which trains the runs of a queue.

    Args:
        folder: where each worker's log is appended to.
        keep: file descriptors that hold the devices, for every worker to inherit.
    """

    def __init__(
        self,
        runs: RunQueue,
        devices: Sequence[Device],
        folder: Path,
        *,
        retries: RetryPolicy,
        keep: Sequence[int] = (),
        allow_backend_change: bool = False,
    ) -> None:
        self._runs, self._retries = runs, retries
        self._keep, self._allow_backend_change = keep, allow_backend_change
        self._raised: BaseException | None = None  # by a thread that serves a device
        self.slots = [Slot(device, folder / f"{device.kind}-{device.id}.log") for device in devices]
        self._ticks: Ticks = ()
        self._threads: list[threading.Thread] = []

    def train(
        self, should_stop: Callable[[], bool], grace_seconds: float, show: Callable[[dict[str, Any]], None]
    ) -> None:
        """Train until nothing is left to do, showing the status as time goes; or until asked to stop, every run saved.

        Args:
            grace_seconds: how long workers may take to stop before they are killed.
        """
        try:
            for slot in self.slots:
                thread = threading.Thread(target=self._serve, args=(slot, grace_seconds), daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self._stop(WorkerProcess.stop)
            raise BackendUnavailableError(
                f"--devices: got no thread for each of them ({error}); expected {len(self.slots)}. Name fewer devices, "
                "or raise the limit on processes (ulimit -u)."
            ) from None
        while not self._join(_REFRESH_SECONDS):
            show(self.status())
            if should_stop() or self._raised is not None:
                self._stop(WorkerProcess.stop)
                if not self._join(grace_seconds):
                    self._stop(WorkerProcess.kill)
        show(self.status())
        if self._raised is not None:
            raise self._raised

    def status(self) -> dict[str, Any]:
        """Plain data: how many runs are in which state, how fast it goes, and what each worker does."""
        now = time.monotonic()
        if trained := sum(slot.trained for slot in self.slots):  # not before, while workers start
            self._ticks = with_tick(self._ticks, now, trained)
        here = {run.member.name: slot.step for slot in self.slots if (run := slot.run) is not None}
        states = self._runs.states()
        left = steps_left(attrs.evolve(state, step=here.get(state.name, state.step)) for state in states)
        pace = describe_pace(left, steps_per_second(self._ticks, now))
        workers = [_describe_slot(slot, now) for slot in self.slots]
        return {"counts": count_statuses(states), "pace": pace, "workers": workers}

    def _join(self, seconds: float) -> bool:
        """Wait for so long; whether everything has ended."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        return not any(thread.is_alive() for thread in self._threads)

    def _stop(self, end: Callable[[WorkerProcess], None]) -> None:
        """Stop or kill every worker, and give out no more runs."""
        self._runs.stop()
        for slot in self.slots:
            worker = slot.worker
            if worker is not None:
                end(worker)

    def _serve(self, slot: Slot, grace_seconds: float) -> None:
        """Train on a device until nothing is left; whatever is raised here ends the whole sweep, every run saved."""
        try:
            self._serve_runs(slot)
        except BaseException as error:
            logger.error("%s: %s: %s; the sweep stops", slot.device, type(error).__name__, error)
            self._raised = self._raised or error
            if slot.worker is not None:
                slot.worker.close(grace_seconds)

    def _serve_runs(self, slot: Slot) -> None:
        most = self._retries.max_worker_failures
        while slot.failures < most and (run := self._runs.take(str(slot.device))) is not None:
            slot.run, slot.step, slot.ticks, slot.note = run, run.state.step, (), ""
            ending = self._attempt(slot, run)
            slot.run = None
            self._runs.record_ending(run, ending)
            if counts_against_device(ending):
                slot.failures += 1
                slot.note = ending.reason
                logger.warning("%s: %s; see %s", slot.device, slot.note, slot.log)
                self._runs.wait(self._retries.pause_after(slot.failures))
            else:
                slot.failures = 0
        if slot.worker is not None:
            slot.worker.close(_LEAVING_SECONDS)
        if slot.failures >= most:
            slot.note = f"takes no more runs after {slot.failures} failures in a row; the last: {slot.note}"
            logger.error("%s %s", slot.device, slot.note)

    def _attempt(self, slot: Slot, run: QueuedRun) -> Ending:
        spec = with_run(run.member.spec, backend=slot.device.backend(run.member.spec.run.backend))
        if slot.worker is None:
            try:
                slot.worker = self._start_worker(slot)
            except OSError as error:
                message = f"worker: got no process ({error}); expected one. It is tried again."
                return Ending(ExitCode.UNAVAILABLE, run.member.name, spec.run.store, None, "failed", message)
            if self._runs.is_stopping:  # since, and this worker has not been told
                slot.worker.stop()

        def progress(step: int) -> None:
            slot.trained += max(0, step - slot.step)
            slot.step = step
            slot.ticks = with_tick(slot.ticks, time.monotonic(), slot.trained)

        ending = slot.worker.ask(spec, allow_backend_change=self._allow_backend_change, progress=progress)
        if ending.status in ("complete", "interrupted") and ending.step is not None:
            progress(ending.step)
        if ending.code not in SAME_PROCESS:
            slot.worker.close(_LEAVING_SECONDS)
            slot.worker = None
        return ending

    def _start_worker(self, slot: Slot) -> WorkerProcess:
        with slot.log.open("ab") as log:
            environment = {**slot.device.environment(), "ICL_WORKER": str(slot.device)}
            return WorkerProcess(environment, log, self._keep)


def _describe_slot(slot: Slot, now: float) -> dict[str, Any]:
    """What a device does, as plain data."""
    run = slot.run
    return {
        "device": str(slot.device),
        "pid": slot.worker and slot.worker.pid,
        "run": run and run.member.name,
        "step": slot.step,
        "total_steps": run and run.state.total_steps,
        "steps_per_second": steps_per_second(slot.ticks, now) if run else None,
        "note": slot.note,
    }
