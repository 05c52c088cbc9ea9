"""SIGTERM and SIGINT: the first asks to stop and ends the process if that takes too long; the second ends it.

A process that hangs without a signal, as on a chip that was taken away, may be ended as well.
Nothing saved is torn by an exit at any moment, so leaving in the middle costs at most the steps since the last save.
"""

import os
import signal
import socket
import sys
import threading
import time

EXIT_INTERRUPTED = 75
_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether somebody asked this process to stop while inside; to be entered in the main thread.

    Args:
        grace_seconds: how long after being asked to stop the process may go on.
        watchdog_seconds: how long it may go on without calling this, asked to stop or not; None for ever.
    """

    def __init__(self, grace_seconds: float, watchdog_seconds: float | None = None) -> None:
        self._grace_seconds, self._watchdog_seconds = grace_seconds, watchdog_seconds
        self._called = time.monotonic()
        self._event = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def __enter__(self) -> "StopRequest":
        # Python runs a signal's handler between two steps of the main thread, which a compilation holds up for long.
        # The number of the signal is written to this socket at once, and another thread reads it there.
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in _NUMBERS}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="icl-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._writer.close()  # which ends the thread
        self._thread.join()
        self._reader.close()

    def __call__(self) -> bool:
        """Whether a signal has come."""
        self._called = time.monotonic()
        return self._event.is_set()

    def _watch(self) -> None:
        self._reader.settimeout(None if self._watchdog_seconds is None else min(1.0, self._watchdog_seconds))
        first = None
        while first is None:
            first = self._next_signal()
            if first is None and time.monotonic() - self._called > float(self._watchdog_seconds or 0):
                _say(f"nothing has ended in {self._watchdog_seconds:g} s: leaving; run again to go on")
                os._exit(EXIT_INTERRUPTED)
        if not first:
            return
        self._event.set()
        _say(f"{signal.Signals(first).name}: saving at the end of this chunk")
        self._reader.settimeout(self._grace_seconds)
        second = self._next_signal()
        if second is None:
            _say(f"no chunk ended and was saved within {self._grace_seconds:g} s: leaving; run again to go on")
            os._exit(EXIT_INTERRUPTED)
        if second:
            _say(f"{signal.Signals(second).name} again: leaving; run again to go on")
            os._exit(128 + second)

    def _next_signal(self) -> int | None:
        """The number of the next signal that asks to stop; 0 when none will come; None when it takes too long."""
        try:
            while received := self._reader.recv(1):
                if received[0] in _NUMBERS:
                    return received[0]
        except TimeoutError:
            return None
        return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
