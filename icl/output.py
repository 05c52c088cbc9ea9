"""stdout and stderr of a command, which nobody has to read: a stream that is closed, full or asleep ends nothing.

What cannot be told is dropped. The reader of stderr is not waited for either, since training goes on without one; the
reader of stdout is, since what is said there is the result.
"""

import io
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_PATIENCE_SECONDS = 1.0  # for a reader of stderr that is slow
_MOST_WAITING = 1000  # writes to a stderr that nobody reads


@contextmanager
def unbreakable_output() -> Iterator[None]:
    """Have sys.stdout and sys.stderr never raise while inside, and sys.stderr never block."""
    _fill_standard_descriptors()
    before = sys.stdout, sys.stderr
    unbreakable = [_unbreakable(sys.stdout, _Result), _unbreakable(sys.stderr, _Patient)]
    sys.stdout, sys.stderr = unbreakable
    try:
        yield
    finally:
        for stream in unbreakable:
            stream.flush()
        sys.stdout, sys.stderr = before


class _Descriptor(io.RawIOBase):
    """A file descriptor of its own for what a stream writes to; what it does not take is lost."""

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: "bytes | bytearray | memoryview[int]") -> int:  # type: ignore[override]
        left = bytes(data)
        with suppress(OSError):
            while left:
                left = left[os.write(self._fd, left) :]
        return len(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


class _Result(_Descriptor):
    """The same, after whatever was said on stderr before, for those who read both as one."""

    def write(self, data: "bytes | bytearray | memoryview[int]") -> int:  # type: ignore[override]
        sys.stderr.flush()
        return super().write(data)


class _Patient(_Descriptor):
    """The same, written by a thread as long as there is something to write: a reader that sleeps holds nobody up."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._waiting = deque[bytes]()
        self._changed = threading.Condition()
        self._asleep = False

    def write(self, data: "bytes | bytearray | memoryview[int]") -> int:  # type: ignore[override]
        with self._changed:
            self._waiting.append(bytes(data))
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.pop()
            if len(self._waiting) == 1:
                try:
                    threading.Thread(target=self._deliver, name="icl-stderr", daemon=True).start()
                except RuntimeError:  # no more threads are to be had
                    super().write(self._waiting.popleft())
        return len(data)

    def flush(self) -> None:
        """Wait for the reader, for a while; one that was asleep then is not waited for again before it has woken up."""
        with self._changed:
            patience = 0.0 if self._asleep else _PATIENCE_SECONDS
            self._asleep = not self._changed.wait_for(lambda: not self._waiting, patience)

    def _deliver(self) -> None:
        waiting = True
        while waiting:
            super().write(self._waiting[0])
            with self._changed:
                self._waiting.popleft()
                waiting = bool(self._waiting)
                self._changed.notify_all()


def _unbreakable(stream: TextIO, kind: type[_Descriptor]) -> TextIO:
    """A stream to the same descriptor; the stream itself where it has none, as in a notebook, or is one already."""
    try:
        if isinstance(getattr(stream, "buffer", None), _Descriptor):
            return stream
        with suppress(OSError):
            stream.flush()
        raw = kind(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return stream
    return io.TextIOWrapper(  # over the descriptor itself, as with `python -u`
        raw,  # type: ignore[type-var]
        stream.encoding,
        "backslashreplace",
        line_buffering=True,
        write_through=True,
    )


def _fill_standard_descriptors() -> None:
    """Open /dev/null for those of 0 to 2 that are closed, so that no file of ours gets their number."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
