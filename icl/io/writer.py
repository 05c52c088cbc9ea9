"""Saving beside training: jobs run in order on one thread, within bounded memory, and none is forgotten."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

from icl.io.errors import TransientStoreError

logger = logging.getLogger("icl")
_CAPACITY = 2**28  # bytes; some 400 states of a 50,000-parameter model, or ten of a 2,000,000-parameter one
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between two tries of one job


class Writer:
    """Runs the jobs it is given, one after another, while the caller goes on.

    Laws: jobs end in the order they were given; none begins after one has failed; a job must bear being run twice.

    Args:
        persist: try a job that failed for a passing reason again, as long as it takes; otherwise it fails.
        capacity: bytes that may wait; whoever gives more waits as well.
    """

    def __init__(self, *, persist: bool, capacity: int = _CAPACITY) -> None:
        self._persist, self._capacity = persist, capacity
        self._jobs = deque[tuple[Callable[[], None], int]]()
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._closing = self._abandoned = False
        self._thread = threading.Thread(target=self._work, name="icl-saving", daemon=True)

    def submit(self, job: Callable[[], None], num_bytes: int = 0) -> None:
        """Have `job` run after those before it; waits while too much waits. Raises what an earlier job raised."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or not self._jobs or self._waiting + num_bytes <= self._capacity
            )
            self._raise_failure()
            self._jobs.append((job, num_bytes))
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when every job has ended. Raises what one raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._jobs)
            self._raise_failure()

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for every job; one that fails is raised, unless something else is already on its way up."""
        with self._changed:
            self._closing, self._abandoned = True, error is not None
            self._changed.notify_all()
        self._thread.join()
        if error is None:
            self._raise_failure()

    @property
    def _waiting(self) -> int:
        return sum(num_bytes for _, num_bytes in self._jobs)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs[0][0]  # it stays there until it has ended
            try:
                self._run(job)
            except Exception as error:
                with self._changed:
                    self._failure = error
                    self._jobs.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def _run(self, job: Callable[[], None]) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                return job()
            except TransientStoreError as error:
                if not self._persist or self._abandoned:
                    raise
                logger.warning("%s Trying again in %g s; training goes on.", error, pause)
            with self._changed:
                self._changed.wait_for(lambda: self._abandoned, timeout=pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
