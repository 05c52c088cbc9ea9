"""What is left of a sweep: which run is next, and what becomes of one that an attempt has ended."""

import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import attrs

from icl.attempt import EXIT_BACKEND, EXIT_NON_FINITE, EXIT_OWNED, EXIT_SPEC, Ending
from icl.io.errors import StoreError
from icl.io.manifest import saved_steps
from icl.io.states import RunState
from icl.io.store import Store
from icl.io.sweepfile import Member

_LONGEST_PAUSE = 60.0  # seconds before a run or a device is tried again
_ELSEWHERE_PAUSE = 10.0


@attrs.define
class Job:
    """A run of the sweep as this engine sees it; words as in `RunState`, "running" being here."""

    member: Member
    state: RunState
    attempts: int = 0  # in a row that got no further
    not_before: float = 0.0  # on the monotonic clock
    where: str = ""  # it was tried last

    @property
    def is_open(self) -> bool:
        return self.state.word not in ("complete", "failed")


class Work:
    """The runs of a sweep, taken by as many threads as there are devices.

    Args:
        states: where each run stands, in the order of `members`.
        retry_failed: take those that have failed before, too.
        max_attempts: after so many in a row that got no further, a run has failed.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[Member],
        states: Sequence[RunState],
        *,
        retry_failed: bool = False,
        max_attempts: int = 5,
    ) -> None:
        self._store, self._max_attempts = store, max_attempts
        self.jobs = [Job(member, state) for member, state in zip(members, states, strict=True)]
        for job in self.jobs:
            if job.state.word == "running" or (job.state.word == "failed" and retry_failed):
                job.state = attrs.evolve(job.state, word="stopped", note="")
        self._changed = threading.Condition()
        self._stopping = False

    def states(self) -> list[RunState]:
        """Where each run stands, in order."""
        return [job.state for job in self.jobs]

    def take(self, where: str) -> Job | None:
        """The next run to train, waiting for one to be due; None when there will be none.

        A run that just failed at `where` is left to others if there is anything else to do.
        """
        with self._changed:
            while not self._stopping and any(job.is_open for job in self.jobs):
                job = self.take_due(where)
                if job is not None:
                    return job
                due = min((job.not_before for job in self._waiting()), default=None)
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
            return None

    def take_due(self, where: str) -> Job | None:
        """The same without waiting."""
        with self._changed:
            ready = [job for job in self._waiting() if job.not_before <= time.monotonic()]
            if self._stopping or not ready:
                return None
            job = min(ready, key=lambda job: job.attempts > 0 and job.where == where)
            job.state, job.where = attrs.evolve(job.state, word="running", note=""), where
            return job

    def _waiting(self) -> list[Job]:
        return [job for job in self.jobs if job.is_open and job.state.word != "running"]

    def settle(self, job: Job, result: Ending | int) -> None:
        """Say how an attempt at a run that was taken ended: as an ending, or as the exit code of a dead process."""
        newest = self._newest_state(job)
        with self._changed:
            if isinstance(result, Ending) and result.code == 0:
                job.state = attrs.evolve(job.state, word="complete", step=job.state.total_steps, note="")
            elif isinstance(result, Ending) and result.code == EXIT_OWNED:
                job.state = attrs.evolve(job.state, word="stopped", note="trained by another process")
                job.not_before = time.monotonic() + _ELSEWHERE_PAUSE
            else:
                if newest > job.state.step:
                    job.attempts = 0
                job.attempts += not (isinstance(result, Ending) and result.code == EXIT_BACKEND)  # not the run's fault
                # The same would come again.
                final = isinstance(result, Ending) and result.code in (EXIT_NON_FINITE, EXIT_SPEC)
                if not self._stopping and (final or job.attempts >= self._max_attempts):
                    job.state = attrs.evolve(job.state, word="failed", step=newest, note=describe(result))
                else:
                    job.state = attrs.evolve(job.state, word="stopped", step=newest, note=describe(result))
                    job.not_before = time.monotonic() + pause_after(job.attempts)
            self._changed.notify_all()

    def stop(self) -> None:
        """Give out no more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def wait(self, seconds: float) -> None:
        """Pause, unless asked to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, seconds)

    def _newest_state(self, job: Job) -> int:
        with suppress(StoreError):
            return max(saved_steps(self._store, job.member.name, "state"), default=0)
        return job.state.step


def pause_after(failures: int) -> float:
    """Seconds before trying again after so many failures in a row: none after the first, then 1, 2, 4, ..."""
    return min(_LONGEST_PAUSE, 2.0 ** (failures - 2)) if failures > 1 else 0.0


def describe(result: Ending | int) -> str:
    """How an attempt ended, in words."""
    if isinstance(result, Ending):
        return result.error or result.status
    if result >= 0:
        return f"the process ended with exit code {result}"
    return f"the process was ended by {signal.Signals(-result).name}"


def count_words(states: Sequence[RunState]) -> Mapping[str, int]:
    """How many runs are in each state."""
    words = [state.word for state in states]
    return {word: words.count(word) for word in ("complete", "running", "stopped", "pending", "failed")}


def steps_left(states: Iterable[RunState]) -> int:
    """How many steps are still to be trained; what has failed is not."""
    return sum(state.total_steps - state.step for state in states if state.word not in ("complete", "failed"))
