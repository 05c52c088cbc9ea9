"""Those who should read what a process says, and do not."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs

_SET_PIPE_SIZE, _PAGE = 1031, 4096


@attrs.frozen
class Unread:
    """What to give a process as its stderr, and what to put before its command."""

    fd: int | None
    shell: Sequence[str] = ()


@contextmanager
def stderr_that_nobody_reads(reader: str) -> Iterator[Unread]:
    """A pipe whose reader is "gone", or "asleep" with the pipe full; "no stderr", which was closed; a "full" disk."""
    if reader == "no stderr":
        yield Unread(None, ("sh", "-c", 'exec "$0" "$@" 2>&-'))
        return
    if reader == "full":
        with open("/dev/full", "wb") as device:
            yield Unread(device.fileno())
        return
    reading, writing = os.pipe()
    fcntl.fcntl(writing, _SET_PIPE_SIZE, _PAGE)
    if reader == "gone":
        os.close(reading)
    else:
        os.write(writing, b"x" * _PAGE)
    try:
        yield Unread(writing)
    finally:
        os.close(writing)
        if reader != "gone":
            os.close(reading)
