"""Proof that a process has ended: a lock that it holds while it lives, in memory that only its own machine has.

Who finds the lock free knows. Who finds none, on another machine, in another container or after a restart, knows
nothing: what cannot be seen is not dead. No table of processes is read, and no clock.
"""

import atexit
import fcntl
import functools
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Literal

import attrs

_FOLDER = "/dev/shm"  # in memory on every Linux; where it is missing nothing is ever proved
_TOKEN = re.compile(r"[0-9a-f]{16}")


_held = set[tuple[int, str]]()  # process and token; a forked child has its parent's tokens, which are not its own


@attrs.define
class Announcement:
    """A token, and whether its lock is to be left for others to find free."""

    token: str
    remembered: bool = False


@contextmanager
def announced() -> Iterator[Announcement]:
    """A new token, whose lock this process holds while inside."""
    announcement = Announcement(secrets.token_hex(8))
    descriptor = _hold(announcement.token)
    ours = os.getpid(), announcement.token
    _held.add(ours)
    try:
        yield announcement
    finally:
        _held.discard(ours)
        if descriptor is not None:
            if not announcement.remembered:
                _remove(announcement.token)
            os.close(descriptor)


@functools.cache
def this_process() -> str:
    """The token of this process, announced until it ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(announced()).token


def is_ours(token: object) -> bool:
    """Whether this very process has announced a token and not ended it."""
    return (os.getpid(), token) in _held


def look(token: object) -> Literal["alive", "ended", "unknown"]:
    """What is known here of whoever announced a token; "unknown" also for what is no token."""
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        return "unknown"
    try:
        descriptor = os.open(_path(token), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return "unknown"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "alive"
    except OSError:
        return "unknown"
    finally:
        os.close(descriptor)
    return "ended"


def _hold(token: str) -> int | None:
    """A descriptor whose lock is held until it is closed; None where there can be none."""
    try:
        descriptor = os.open(_path(token), os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        _remove(token)
        os.close(descriptor)
        return None
    return descriptor


def _remove(token: str) -> None:
    with suppress(OSError):
        os.unlink(_path(token))


def _path(token: str) -> str:
    return f"{_FOLDER}/icl-{token}"
