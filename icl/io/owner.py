"""Who trains a run: a heartbeat that spares work done twice. The results are right without it.

An owner publishes `owner/<number>.json`, the next number in every interval, and removes the one before. A newcomer
that sees the numbers go on lets the owner be; after four silent intervals, or when the owner is known to have ended, it
takes the next number. A number is created once, so an owner that finds its next one taken knows that it was taken over.
Nobody's clock is read, and nothing is overwritten.
"""

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Literal

import attrs
import orjson

from icl.io import presence
from icl.io.errors import CheckpointError, MissingObjectError, RunOwnedError, StoreError
from icl.io.records import Owner, known
from icl.io.store import Store

logger = logging.getLogger("icl")
_HEARTBEAT_FILE = re.compile(r"([0-9]{12})\.json")
_SILENT_INTERVALS = 4
_DEFAULT_INTERVAL, _LONGEST_INTERVAL = 10.0, 60.0  # seconds; the first of an owner whose heartbeat is damaged
_GOODBYE_SECONDS = 5.0  # for a beat that is on its way when the run ends


@attrs.define
class Ownership:
    """Whether the run is still this process's, as far as its heartbeats have told, and the number of the newest."""

    lost: bool = False
    number: int = 0
    _look: Callable[[], bool] = lambda: False

    def is_taken_over(self) -> bool:
        """Whether another process owns the run now: looked up where no heartbeat has told it yet."""
        return self.lost or self._look()


@contextmanager
def owned(
    store: Store, name: str, *, every: float | None, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Ownership]:
    """Own the run of that name in a store while inside.

    Args:
        every: seconds between two heartbeats; None takes and checks nothing.
        should_stop: asked while another process is watched; when true ownership is given up unseen.

    Raises: RunOwnedError when another process is alive and trains it, or this one does already; also when storage fails
        inside after another has taken over, since then both may have acted on the same files.
    """
    if every is None:
        yield Ownership()
        return
    folder = f"{name}/owner"
    with presence.announced() as process:
        beat = {"every": every, "token": process.token, **_this_process()}
        process.remembered = True  # from now on a heartbeat may be there, also after a failure
        try:
            number = _claim(store, folder, beat, should_stop)
        except RunOwnedError:
            process.remembered = False
            raise
        if number is None:
            process.remembered = False
            yield Ownership(lost=True)
            return
        ownership = Ownership(number=number, look=lambda: _is_taken_over(store, folder, process.token))
        stop = threading.Event()
        arguments = (store, folder, beat, stop, ownership)
        thread = threading.Thread(target=_keep_beating, args=arguments, name="icl-heartbeat", daemon=True)
        thread.start()
        try:
            yield ownership
        except (StoreError, CheckpointError) as error:
            if ownership.is_taken_over():
                raise RunOwnedError(
                    f"{store.url}/{folder}: got another owner, since this process was silent, and then: {error} "
                    "Expected no other process on this run. Nothing saved is harmed; run again to see who owns it."
                ) from error
            raise
        finally:
            stop.set()
            thread.join(_GOODBYE_SECONDS)
            with suppress(StoreError):
                _release(store, folder, beat, ownership.number)
                process.remembered = False


@attrs.frozen
class Heartbeat:
    """The newest heartbeat of a run's owner, and what is known here of its process.

    `process` is "ended" also when nobody owns the run; an "unknown" one is alive when a second look after `every`
    seconds differs. `number` is the highest that was taken.
    """

    number: int = 0
    data: bytes = b""
    process: Literal["alive", "ended", "unknown"] = "ended"

    @property
    def owner(self) -> Mapping[str, object]:
        """What the heartbeat says of its process."""
        return _decode(self.data)

    @property
    def where(self) -> str:
        """Which process it is."""
        return f"{self.owner.get('host')}, process {self.owner.get('pid')}"

    @property
    def every(self) -> float:
        """Seconds between two of its heartbeats."""
        return _interval(self.owner)


def read_heartbeat(store: Store, name: str) -> Heartbeat:
    """Who owns a run, from the newest heartbeat that is there now."""
    return _read_newest(store, f"{name}/owner")


def _read_newest(store: Store, folder: str) -> Heartbeat:
    numbers = _numbers(store, folder)
    highest = max(numbers, default=0)
    for number in reversed(numbers):
        with suppress(MissingObjectError):  # its owner has gone on to the next one, or let go
            data = store.read(_path(folder, number))
            owner = _decode(data)
            return Heartbeat(highest, data, "ended" if owner.get("released") else presence.look(owner.get("token")))
    return Heartbeat(highest)


def _claim(store: Store, folder: str, beat: Mapping[str, object], should_stop: Callable[[], bool]) -> int | None:
    """The number that is ours from now on; None when asked to stop before there was one. Raises RunOwnedError."""
    watched: Heartbeat | None = None
    watched_since = time.monotonic()
    while True:
        watching = time.monotonic() - watched_since
        seen = _read_newest(store, folder)
        if presence.is_ours(seen.owner.get("token")):
            raise RunOwnedError(
                f"{store.url}/{folder}: got a run that this process trains already; expected it to be trained once "
                "at a time. Wait for that to end, which a progress function cannot, or open it with icl.load_run."
            )
        silent = watched is not None and watched.data == seen.data and watching >= _SILENT_INTERVALS * seen.every
        if silent:
            logger.warning("%s: %s has been silent for %g s: taking over", folder, _who(seen), watching)
        if silent or seen.process == "ended":
            if _take(store, folder, seen.number + 1, beat, 0):
                for older in _numbers(store, folder):
                    if older <= seen.number:
                        store.discard(_path(folder, older))
                return seen.number + 1
            continue
        if watched is None or watched.owner.get("token") != seen.owner.get("token"):
            watched, watched_since = seen, time.monotonic()
            longest = _SILENT_INTERVALS * seen.every
            logger.info("%s: watching whether %s is alive, for up to %g s", folder, _who(seen), longest)
        elif seen.data != watched.data:
            raise RunOwnedError(
                f"{store.url}/{folder}: got a heartbeat {watching:.1f} s ago or less from {_who(seen)}; expected no "
                "other process on this run. Nothing is wrong: it goes on there. Stop it there to go on here."
            )
        if should_stop():
            return None
        time.sleep(min(seen.every / 4, 1.0))


def _keep_beating(
    store: Store, folder: str, beat: Mapping[str, object], stop: threading.Event, ownership: Ownership
) -> None:
    count, failing = 0, False
    while not stop.wait(_interval(beat)):
        count += 1
        try:
            if not _take(store, folder, ownership.number + 1, beat, count):
                logger.warning("%s: another process has taken over, since this one was silent", folder)
                ownership.lost = True
                return
            ownership.number += 1
            store.discard(_path(folder, ownership.number - 1))
            failing = False
        except StoreError as error:
            if not failing:
                logger.warning("%s Training goes on without a heartbeat.", error)
            failing = True


def _take(store: Store, folder: str, number: int, beat: Mapping[str, object], count: int) -> bool:
    """Whether a number is ours now; also when it was before, and the answer to that was lost."""
    path = _path(folder, number)
    if store.create(path, _encode(beat, count)):
        return True
    with suppress(MissingObjectError):  # it was another's, who has gone on or let go
        return _decode(store.read(path)).get("token") == beat["token"]
    return False


def _release(store: Store, folder: str, beat: Mapping[str, object], number: int) -> None:
    """Remove the heartbeat; where nothing may be removed a last one says that the run is let go of."""
    if not store.discard(_path(folder, number)):
        store.create(_path(folder, number + 1), _encode({**beat, "released": True}, 0))


def _is_taken_over(store: Store, folder: str, token: str) -> bool:
    with suppress(StoreError):
        seen = _read_newest(store, folder)
        return bool(seen.data) and seen.owner.get("token") != token
    return False


def _numbers(store: Store, folder: str) -> list[int]:
    return sorted(int(match[1]) for match in map(_HEARTBEAT_FILE.fullmatch, store.list(folder)) if match)


def _path(folder: str, number: int) -> str:
    return f"{folder}/{number:012d}.json"


def _encode(beat: Mapping[str, object], count: int) -> bytes:
    return orjson.dumps({**beat, "count": count}, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)


def _decode(data: bytes) -> dict[str, object]:
    """What a heartbeat says, as far as it has the types and bounds of one."""
    try:
        decoded = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return known(Owner, decoded) if isinstance(decoded, dict) else {}


def _interval(owner: Mapping[str, object]) -> float:
    every = owner.get("every")
    return min(float(every), _LONGEST_INTERVAL) if isinstance(every, (int, float)) and every > 0 else _DEFAULT_INTERVAL


def _who(seen: Heartbeat) -> str:
    owner = seen.owner
    return f"process {owner.get('pid')} on {owner.get('host')}, started {owner.get('started')} by its clock"


def _this_process() -> dict[str, object]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
