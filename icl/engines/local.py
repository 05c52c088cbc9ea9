"""One worker process a device on this machine."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from icl.attempt import EXIT_BACKEND, EXIT_STORE, Ending
from icl.core.errors import BackendUnavailableError
from icl.engines.devices import Device
from icl.engines.pace import Ticks, describe_pace, steps_per_second, with_tick
from icl.engines.work import Job, Work, count_words, describe, pause_after, steps_left
from icl.engines.worker import SAME_PROCESS, WorkerProcess
from icl.io.codec import with_run
from icl.stopping import EXIT_INTERRUPTED

logger = logging.getLogger("icl")
_REFRESH_SECONDS = 0.5
_LEAVING_SECONDS = 10.0  # for a worker that has nothing to do any more


@attrs.define
class Slot:
    """A device and what happens on it; read by whoever shows the sweep."""

    device: Device
    log: Path
    job: Job | None = None
    step: int = 0
    trained: int = 0  # steps of all its runs, those that were computed twice among them
    ticks: Ticks = ()
    failures: int = 0  # in a row
    note: str = ""
    worker: WorkerProcess | None = None


class LocalEngine:
    """Trains what `work` gives on the devices of this machine.

    Args:
        folder: where each worker's log is appended to.
        keep: file descriptors that hold the devices, for every worker to inherit.
        max_worker_failures: after so many in a row a device takes no more runs, so that one bad chip spoils nothing.
    """

    def __init__(
        self,
        work: Work,
        devices: Sequence[Device],
        folder: Path,
        *,
        keep: Sequence[int] = (),
        allow_backend_change: bool = False,
        max_worker_failures: int = 5,
    ) -> None:
        self._work, self._keep, self._allow_backend_change = work, keep, allow_backend_change
        self._max_worker_failures = max_worker_failures
        self._raised: BaseException | None = None  # by a thread that serves a device
        self.slots = [Slot(device, folder / f"{device.kind}-{device.id}.log") for device in devices]
        self._ticks: Ticks = ()
        self._threads: list[threading.Thread] = []

    def run(
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
        here = {slot.job.member.name: slot.step for slot in self.slots if slot.job is not None}
        states = self._work.states()
        left = steps_left(attrs.evolve(state, step=here.get(state.name, state.step)) for state in states)
        workers = []
        for slot in self.slots:
            job = slot.job
            workers.append(
                {
                    "device": str(slot.device),
                    "pid": slot.worker and slot.worker.pid,
                    "run": job and job.member.name,
                    "step": slot.step,
                    "total_steps": job and job.state.total_steps,
                    "steps_per_second": steps_per_second(slot.ticks, now) if job else None,
                    "note": slot.note,
                }
            )
        pace = describe_pace(left, steps_per_second(self._ticks, now))
        return {"counts": count_words(states), "pace": pace, "workers": workers}

    def _join(self, seconds: float) -> bool:
        """Wait for so long; whether everything has ended."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _stop(self, end: Callable[[WorkerProcess], None]) -> None:
        """Stop or kill every worker, and give out no more runs."""
        self._work.stop()
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
        while slot.failures < self._max_worker_failures and (job := self._work.take(str(slot.device))) is not None:
            slot.job, slot.step, slot.ticks, slot.note = job, job.state.step, (), ""
            result = self._attempt(slot, job)
            slot.job = None
            self._work.settle(job, result)
            if _is_devices_fault(result):
                slot.failures += 1
                slot.note = describe(result)
                logger.warning("%s: %s; see %s", slot.device, slot.note, slot.log)
                self._work.wait(pause_after(slot.failures))
            else:
                slot.failures = 0
        if slot.worker is not None:
            slot.worker.close(_LEAVING_SECONDS)
        if slot.failures >= self._max_worker_failures:
            slot.note = f"takes no more runs after {slot.failures} failures in a row; the last: {slot.note}"
            logger.error("%s %s", slot.device, slot.note)

    def _attempt(self, slot: Slot, job: Job) -> Ending | int:
        spec = with_run(job.member.spec, backend=slot.device.backend(job.member.spec.run.backend))
        if slot.worker is None:
            try:
                slot.worker = self._begin_worker(slot)
            except OSError as error:
                told = f"worker: got no process ({error}); expected one. It is tried again."
                return Ending(EXIT_BACKEND, job.member.name, spec.run.store, None, "failed", told)
            if self._work.is_stopping:  # since, and this worker has not been told
                slot.worker.stop()

        def progress(step: int) -> None:
            slot.trained += max(0, step - slot.step)
            slot.step = step
            slot.ticks = with_tick(slot.ticks, time.monotonic(), slot.trained)

        result = slot.worker.ask(spec, allow_backend_change=self._allow_backend_change, progress=progress)
        if isinstance(result, Ending) and result.status in ("complete", "interrupted") and result.step is not None:
            progress(result.step)
        if not isinstance(result, Ending) or result.code not in SAME_PROCESS:
            slot.worker.close(_LEAVING_SECONDS)
            slot.worker = None
        return result

    def _begin_worker(self, slot: Slot) -> WorkerProcess:
        with slot.log.open("ab") as log:
            environment = {**slot.device.environment(), "ICL_WORKER": str(slot.device)}
            return WorkerProcess(environment, log, self._keep)


def _is_devices_fault(result: Ending | int) -> bool:
    """Whether an attempt may have failed because of where it ran; a process that somebody ended did not."""
    if isinstance(result, Ending):
        return result.code in (EXIT_BACKEND, EXIT_STORE)
    return result not in (EXIT_INTERRUPTED, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
