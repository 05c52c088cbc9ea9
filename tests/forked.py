"""`python -m icl.run` in a process that is forked from one with PyTorch loaded: two seconds of a processor less.

It is a process like others, to signal, kill and wait for. What is read once, when Python or OpenMP start, it has from
the server that it was forked from: where threads or the seed of hashes matter, a test starts Python itself.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

READ_ONCE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "WANDB_ERROR_REPORTING": "false"}
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["gcsfs", "wandb", "icl.loop", "icl.progress", "icl.stopping", "tests.forked"])


class Forked:
    """What tests use of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess, stdout: Path) -> None:
        self._process, self._stdout = process, stdout
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it lives."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, as soon as it has ended. Raises TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("icl.run", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it has said on stdout, as soon as it has ended. Raises TimeoutExpired."""
        self.wait(timeout)
        return self._stdout.read_text(), None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def python(*arguments: str, log: Path, cwd: Path, environment: Mapping[str, str]) -> Forked:
    """`python -m MODULE ...` or `python -c SCRIPT ...`; stderr goes to the end of a file, which is never full."""
    descriptor, stdout = tempfile.mkstemp(prefix="stdout-", dir=log.parent)
    os.close(descriptor)
    given = (arguments, stdout, str(log), str(cwd), dict(environment))
    process = _FORKS.Process(target=_run, args=given, daemon=True)
    with patch.dict(os.environ, READ_ONCE):
        process.start()  # the first one starts the server
    return Forked(process, Path(stdout))


def _run(arguments: Sequence[str], stdout: str, stderr: str, cwd: str, environment: dict[str, str]) -> None:
    """In the new process: what a shell and Python do for a command, and what Python does at its end."""
    for path, number in ((stdout, 1), (stderr, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    kind, what, *rest = arguments
    sys.argv[:] = [kind, *rest]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
