"""`python -m icl.engines.worker`: a process that trains one run after another on the device that its environment names.

It reads one JSON request a line and answers with JSON lines: progress, then the ending. It stops, its run saved, when
its stdin ends, so that nothing is left behind by whoever started it; everything else it says goes to stderr.
"""

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import attrs
import orjson

from icl.attempt import Ending, attempt, ending_of_process
from icl.core.spec import Spec
from icl.exit_codes import ExitCode
from icl.io.codec import spec_from_data, spec_to_data
from icl.io.names import run_name
from icl.output import unbreakable_output
from icl.stopping import StopRequest

_PROGRESS_SECONDS = 0.5  # between two lines of progress
SAME_PROCESS = (ExitCode.COMPLETE, ExitCode.NON_FINITE, ExitCode.OWNED)  # endings that say nothing against the process


def main() -> int:
    """Serve requests until there are no more; returns the exit code of the last ending."""
    with unbreakable_output():
        return _serve_all()


def _serve_all() -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints belongs to the log
    code = 0

    def answer(line: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # nobody listens any more, and stdin has ended as well
            answers.write(orjson.dumps(line) + b"\n")

    requests = _Requests()
    for request in requests:
        if requests.ended.is_set():
            return ExitCode.INTERRUPTED
        ending = _serve(request, requests, answer)
        code = ending.code
        if code not in SAME_PROCESS:
            break
    return code


class _Requests:
    """The requests on stdin; its end asks this process to stop, also in the middle of a run."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._training: StopRequest | None = None
        self._waiting = queue.SimpleQueue[bytes]()
        threading.Thread(target=self._read, name="icl-requests", daemon=True).start()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while line := self._waiting.get():
            yield orjson.loads(line)

    def stops(self, training: StopRequest) -> None:
        """Have the end of stdin stop this training from now on, also if it has come already."""
        self._training = training
        if self.ended.is_set():
            training.ask()

    def _read(self) -> None:
        # Not sys.stdin, whose lock a thread that waits would hold when the interpreter ends, which aborts it.
        with open(0, "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                self._waiting.put(line)
        self.ended.set()
        self._waiting.put(b"")
        training = self._training  # read after `ended` is set, as `stops` does it the other way round
        if training is not None:
            training.ask()


def _serve(request: Mapping[str, Any], requests: _Requests, answer: Callable[[dict[str, Any]], object]) -> Ending:
    spec = spec_from_data(request["spec"])
    logging.info("%s: started", run_name(spec))
    told = 0.0

    def progress(step: int, row: Mapping[str, float]) -> None:
        nonlocal told
        if time.monotonic() - told > _PROGRESS_SECONDS:
            answer({"step": step})
            told = time.monotonic()

    with StopRequest(spec.run.grace_seconds, spec.run.watchdog_seconds) as should_stop:
        requests.stops(should_stop)
        ending = attempt(
            spec,
            allow_backend_change=request["allow_backend_change"],
            should_stop=should_stop,
            progress=progress,
        )
    logging.info("%s: %s%s", ending.run, ending.status, f": {ending.error}" if ending.error else "")
    answer(attrs.asdict(ending))
    return ending


class WorkerProcess:
    """The other end: a worker that was started here. `ask` blocks; `stop` may be called from another thread."""

    def __init__(self, environment: Mapping[str, str], log: IO[bytes] | None = None, keep: Sequence[int] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "icl.engines.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
            pass_fds=keep,
            start_new_session=True,  # Ctrl-C at a terminal is for whoever started it, who passes it on
        )
        self.pid = self._process.pid

    def ask(
        self, spec: Spec, *, allow_backend_change: bool, progress: Callable[[int], None] = lambda step: None
    ) -> Ending:
        """How an attempt ended, also when the worker died without saying so."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"spec": spec_to_data(spec), "allow_backend_change": allow_backend_change}
        with suppress(BrokenPipeError, ValueError):  # it has died, or was asked to stop
            self._process.stdin.write(orjson.dumps(request) + b"\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            with suppress(orjson.JSONDecodeError):  # a line that a kill cut off
                said = orjson.loads(line)
                if "code" in said:
                    return Ending(**said)
                progress(said["step"])
        return ending_of_process(self._process.wait(), run_name(spec), spec.run.store)

    def stop(self) -> None:
        """Ask the worker to save its run and leave: no signal, which would be a second one if it was sent one too."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End the worker and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self, seconds: float) -> int:
        """Let a worker leave; after so many seconds it is killed. Returns its exit code."""
        self.stop()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
