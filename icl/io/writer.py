"""Saving beside training: saves run on threads of their own, within bounded memory, and none is forgotten."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

import attrs

from icl.io.errors import TransientStoreError

logger = logging.getLogger("icl")
_CAPACITY = 2**28  # bytes; some 400 states of a 50,000-parameter model, or ten of a 2,000,000-parameter one
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between two tries of one save


@attrs.define(eq=False)
class _Save:
    run: Callable[[], None]
    num_bytes: int
    alone: bool
    started: bool = False


class Writer:
    """Runs the saves it is given while the caller goes on.

    Laws: a save that is `alone` begins when all before it have ended, and those after it begin when it has ended; none
    begins after one has failed. A save must bear being run twice.

    Args:
        persist: try a save that failed for a passing reason again, as long as it takes; otherwise it fails.
        num_threads: saves that run at once.
        capacity: bytes that may wait; whoever gives more waits as well.
    """

    def __init__(self, *, persist: bool, num_threads: int = 1, capacity: int = _CAPACITY) -> None:
        self._persist, self._capacity = persist, capacity
        self._saves = deque[_Save]()  # in the order given; one that has ended is taken out
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._closing = self._abandoned = False
        self._threads = [
            threading.Thread(target=self._work, name="icl-saving", daemon=True) for _ in range(num_threads)
        ]

    def submit(self, run: Callable[[], None], num_bytes: int = 0, *, alone: bool = True) -> None:
        """Have `run` called; waits while too much waits. Raises what an earlier save raised."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or not self._saves or self._waiting() + num_bytes <= self._capacity
            )
            self._raise_failure()
            self._saves.append(_Save(run, num_bytes, alone))
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when every save has ended. Raises what one raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._saves)
            self._raise_failure()

    def __enter__(self) -> "Writer":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Wait for every save; one that fails is raised, unless something else is already on its way up."""
        with self._changed:
            self._closing, self._abandoned = True, error is not None
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        if error is None:
            self._raise_failure()

    def _waiting(self) -> int:
        return sum(save.num_bytes for save in self._saves)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _next(self) -> _Save | None:
        """The first save that has not started, if its turn has come."""
        for save in self._saves:
            if save.started and not save.alone:
                continue
            ready = not save.started and (not save.alone or save is self._saves[0])
            return save if ready else None
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next() or self._failure or (self._closing and not self._saves))
                save = self._next()
                if save is None or self._failure:
                    return
                save.started = True
            try:
                self._run(save)
            except Exception as error:
                with self._changed:
                    self._failure = self._failure or error
            finally:
                with self._changed:
                    self._saves.remove(save)
                    self._changed.notify_all()

    def _run(self, save: _Save) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                return save.run()
            except TransientStoreError as error:
                if not self._persist or self._abandoned:
                    raise
                logger.warning("%s Trying again in %g s; training goes on.", error, pause)
            with self._changed:
                self._changed.wait_for(lambda: self._abandoned, timeout=pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
