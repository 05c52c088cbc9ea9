"""Who trains a run: a heartbeat that spares work done twice. The results are right without it.

An owner publishes `owner/<epoch>.json`, each epoch once, and changes it in every interval. A newcomer that sees it
change lets the owner be; one that sees it unchanged for four intervals takes the next epoch. Nobody's clock is read.
"""

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone

import attrs
import orjson

from icl.io.errors import MissingObjectError, RunOwnedError, StoreError
from icl.io.records import Owner, known
from icl.io.store import Store

logger = logging.getLogger("icl")
_EPOCH_FILE = re.compile(r"([0-9]{12})\.json")
_SILENT_INTERVALS = 4
_DEFAULT_INTERVAL, _LONGEST_INTERVAL = 10.0, 60.0  # seconds; the first of an owner whose heartbeat is damaged
_GOODBYE_SECONDS = 5.0  # for a beat that is on its way when the run ends


_tokens: set[str] = set()  # of what this process owns now


@attrs.define
class Ownership:
    """Whether the run is still this process's."""

    lost: bool = False


@contextmanager
def owned(
    store: Store, name: str, *, every: float | None, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Ownership]:
    """Own the run of that name in a store while inside.

    Args:
        every: seconds between two heartbeats; None takes and checks nothing.
        should_stop: asked while another process is watched; when true ownership is given up unseen.

    Raises: RunOwnedError when another process is alive and trains it.
    """
    ownership = Ownership()
    if every is None:
        yield ownership
        return
    folder = f"{name}/owner"
    token = secrets.token_hex(8)
    beat = {"every": every, "token": token, **_this_process()}
    _tokens.add(token)  # before it is published
    try:
        epoch = _claim(store, folder, beat, should_stop)
        if epoch is None:
            yield Ownership(lost=True)
            return
        stop = threading.Event()
        arguments = (store, folder, epoch, beat, stop, ownership)
        thread = threading.Thread(target=_keep_beating, args=arguments, name="icl-heartbeat", daemon=True)
        thread.start()
        try:
            yield ownership
        finally:
            stop.set()
            thread.join(_GOODBYE_SECONDS)
            with suppress(StoreError):
                store.delete(_path(folder, epoch))
    finally:
        _tokens.discard(token)


@attrs.frozen
class Sighting:
    """What one look at a run's ownership shows: nobody, a process known to be gone, or one to look at again."""

    data: bytes = b""
    where: str = ""
    gone: bool = True
    every: float = 0.0


def sight(store: Store, name: str) -> Sighting:
    """One look at who owns a run; an owner elsewhere is alive when a second look after `every` seconds differs."""
    folder = f"{name}/owner"
    for epoch in reversed(_epochs(store, folder)):
        with suppress(MissingObjectError):
            data = store.read(_path(folder, epoch))
            owner = _decode(data)
            where = f"{owner.get('host')}, process {owner.get('pid')}"
            return Sighting(data, where, _has_ended(owner), _interval(owner))
    return Sighting()


def is_on_this_machine(sighting: Sighting) -> bool:
    """Whether the owner seen ran under this kernel, where whether it is gone is known at once."""
    return _decode(sighting.data).get("machine") == _machine() != ""


def _claim(store: Store, folder: str, beat: Mapping[str, object], should_stop: Callable[[], bool]) -> int | None:
    """The epoch that is ours from now on; None when asked to stop before it was known."""
    while True:
        epochs = _epochs(store, folder)
        if epochs and not _is_dead(store, _path(folder, epochs[-1]), should_stop):
            return None
        epoch = epochs[-1] + 1 if epochs else 1
        path, data = _path(folder, epoch), _encode(beat, 0)
        # A repeated request finds what the first one published.
        with suppress(MissingObjectError):
            if store.create(path, data) or store.read(path) == data:
                for older in epochs:
                    store.delete(_path(folder, older))
                return epoch


def _is_dead(store: Store, path: str, should_stop: Callable[[], bool]) -> bool:
    """Whether the owner there is gone; False when asked to stop before it was known. Raises RunOwnedError."""
    try:
        first = store.read(path)
        owner = _decode(first)
        if _has_ended(owner):
            return True
        every = _interval(owner)
        who = f"process {owner.get('pid')} on {owner.get('host')}, begun {owner.get('started')} by its clock"
        logger.info("%s: watching whether %s is alive, for up to %g s", path, who, _SILENT_INTERVALS * every)
        begun = time.monotonic()
        while (watched := time.monotonic() - begun) < _SILENT_INTERVALS * every:
            if should_stop():
                return False
            if store.read(path) != first:
                raise RunOwnedError(
                    f"{store.url}/{path}: got a heartbeat {watched:.1f} s ago or less from {who}; expected no other "
                    "process on this run. Nothing is wrong: it goes on there. Stop it there to go on here."
                )
            time.sleep(min(every / 4, 1.0))
    except MissingObjectError:  # it has just ended
        return True
    logger.warning("%s: %s has been silent for %g s: taking over", path, who, _SILENT_INTERVALS * every)
    return True


def _keep_beating(
    store: Store,
    folder: str,
    epoch: int,
    beat: Mapping[str, object],
    stop: threading.Event,
    ownership: Ownership,
) -> None:
    count, failing = 0, False
    while not stop.wait(_interval(beat)):
        count += 1
        try:
            if max(_epochs(store, folder), default=epoch) > epoch:
                logger.warning("%s: another process has taken over, since this one was silent", folder)
                ownership.lost = True
                return
            store.replace(_path(folder, epoch), _encode(beat, count))
            failing = False
        except StoreError as error:
            if not failing:
                logger.warning("%s Training goes on without a heartbeat.", error)
            failing = True


def _epochs(store: Store, folder: str) -> list[int]:
    return sorted(int(match[1]) for match in map(_EPOCH_FILE.fullmatch, store.list(folder)) if match)


def _path(folder: str, epoch: int) -> str:
    return f"{folder}/{epoch:012d}.json"


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


def _this_process() -> dict[str, object]:
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "pid_started": _process_start(os.getpid()),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _has_ended(owner: Mapping[str, object]) -> bool:
    """Whether the owner ran on this very machine, where its process is no more, or has let go of the run."""
    pid = owner.get("pid")
    if not owner.get("machine") or owner["machine"] != _machine() or not isinstance(pid, int):
        return False
    if pid == os.getpid():
        return owner.get("token") not in _tokens
    return _process_start(pid) != owner.get("pid_started")


def _machine() -> str:
    """Names one boot of one kernel and one numbering of its processes; empty where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """When a process began, in ticks since boot; empty when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
