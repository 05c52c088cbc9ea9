"""SIGTERM and SIGINT: the first asks to stop and ends the process if that takes too long; the second ends it.

Nothing saved is torn by an exit at any moment, so leaving in the middle costs at most the steps since the last save.
"""

import os
import signal
import socket
import sys
import threading

EXIT_INTERRUPTED = 75
_NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether somebody asked this process to stop while inside; to be entered in the main thread.

    Args:
        grace_seconds: how long after being asked the process may go on; it may be set later.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
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
        return self._event.is_set()

    def _watch(self) -> None:
        first = self._next_signal()
        if not first:
            return
        self._event.set()
        _say(f"{signal.Signals(first).name}: saving at the end of this chunk")
        self._reader.settimeout(self.grace_seconds)
        try:
            second = self._next_signal()
        except TimeoutError:
            _say(f"no chunk ended and was saved within {self.grace_seconds:g} s: leaving; run again to go on")
            os._exit(EXIT_INTERRUPTED)
        if second:
            _say(f"{signal.Signals(second).name} again: leaving; run again to go on")
            os._exit(128 + second)

    def _next_signal(self) -> int:
        """The number of the next signal that asks to stop; 0 when none will come."""
        while received := self._reader.recv(1):
            if received[0] in _NUMBERS:
                return received[0]
        return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
