"""The runs of a sweep that are still to be trained: which is next, and what becomes of one whose attempt has ended."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import attrs

from icl.attempt import Ending
from icl.core.status import RunStatus
from icl.engines.retries import RetryPolicy, counts_against_run
from icl.io.errors import StoreError
from icl.io.manifest import saved_steps
from icl.io.states import RunState
from icl.io.store import Store
from icl.io.sweepfile import Member


@attrs.define
class QueuedRun:
    """A run of the sweep as this engine knows it; it is "running" while it is taken here."""

    member: Member
    state: RunState
    attempts: int = 0  # in a row that got no further
    not_before: float = 0.0  # on the monotonic clock
    where: str = ""  # it was tried last

    @property
    def is_open(self) -> bool:
        return self.state.status not in ("complete", "failed")

    def change(self, status: RunStatus, step: int, note: str = "") -> None:
        """Say where it stands now."""
        self.state = attrs.evolve(self.state, status=status, step=step, note=note)


class RunQueue:
    """The runs of a sweep, taken by as many threads as there are devices.

    Args:
        states: where each run stands, in the order of `members`.
        retry_failed: take those that have failed before, too.
    """

    def __init__(
        self,
        store: Store,
        members: Sequence[Member],
        states: Sequence[RunState],
        *,
        retries: RetryPolicy,
        retry_failed: bool = False,
    ) -> None:
        self._store, self._retries = store, retries
        self.runs = [QueuedRun(member, state) for member, state in zip(members, states, strict=True)]
        for run in self.runs:
            if run.state.status == "running" or (run.state.status == "failed" and retry_failed):
                run.change("stopped", run.state.step)
        self._changed = threading.Condition()
        self._stopping = False

    def states(self) -> list[RunState]:
        """Where each run stands, in order."""
        return [run.state for run in self.runs]

    def take(self, where: str) -> QueuedRun | None:
        """The next run to train, waiting for one to be due; None when there will be none.

        A run that just failed at `where` is left to others if there is anything else to do.
        """
        with self._changed:
            while not self._stopping and any(run.is_open for run in self.runs):
                run = self.take_due(where)
                if run is not None:
                    return run
                due = min((run.not_before for run in self._waiting()), default=None)
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
            return None

    def take_due(self, where: str) -> QueuedRun | None:
        """The same without waiting."""
        with self._changed:
            due = [run for run in self._waiting() if run.not_before <= time.monotonic()]
            if self._stopping or not due:
                return None
            run = min(due, key=lambda run: run.attempts > 0 and run.where == where)
            run.change("running", run.state.step)
            run.where = where
            return run

    def record_ending(self, run: QueuedRun, ending: Ending) -> None:
        """Say how an attempt at a run that was taken has ended."""
        newest = self._newest_state(run)
        with self._changed:
            if ending.status in ("complete", "already_complete"):
                run.change("complete", run.state.total_steps)
            elif ending.status == "running_elsewhere":
                run.change("stopped", run.state.step, "trained by another process")
                run.not_before = time.monotonic() + self._retries.pause_for_owner
            else:
                if newest > run.state.step:
                    run.attempts = 0
                run.attempts += counts_against_run(ending)
                if not self._stopping and self._retries.is_final(ending, run.attempts):
                    run.change("failed", newest, ending.reason)
                else:
                    run.change("stopped", newest, ending.reason)
                    run.not_before = time.monotonic() + self._retries.pause_after(run.attempts)
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

    def _waiting(self) -> list[QueuedRun]:
        return [run for run in self.runs if run.is_open and run.state.status != "running"]

    def _newest_state(self, run: QueuedRun) -> int:
        with suppress(StoreError):
            return max(saved_steps(self._store, run.member.name, "state"), default=0)
        return run.state.step


def count_statuses(states: Sequence[RunState]) -> Mapping[str, int]:
    """How many runs have each status."""
    found = [state.status for state in states]
    return {status: found.count(status) for status in ("complete", "running", "stopped", "pending", "failed")}


def steps_left(states: Iterable[RunState]) -> int:
    """How many steps are still to be trained; those of a failed run are not."""
    return sum(state.total_steps - state.step for state in states if state.status not in ("complete", "failed"))
