"""A sweep under way on this machine: one process holds its folder, writes there how it goes, and can be found there."""

import fcntl
import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import orjson

from icl.core.errors import SpecError
from icl.io.errors import StoreError
from icl.io.location import resolve_location

_START_SECONDS, _STOP_SECONDS = 60.0, 60.0
_POLL_SECONDS = 0.1
_LONGEST_NAME = 60  # characters, of at most 4 bytes each
_PID = re.compile(rb"[1-9][0-9]{0,8}")  # 0 would be everybody in this process's group
_LONGEST_PID, _LARGEST_STATUS = 64, 2**24  # bytes


@attrs.frozen
class Session:
    """The folder of a sweep on one machine: logs, the pid of who runs it, and its last status."""

    folder: Path

    @property
    def log(self) -> Path:
        """What a detached sweep says."""
        return self.folder / "sweep.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the process that runs the sweep. Raises SpecError when there is one."""
        with ExitStack() as stack:
            with self._writable():
                file = stack.enter_context(self._pid_file.open("ab+", buffering=0))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SpecError(
                    f"sweep: got one that process {self.pid()} runs here; expected none. Watch it with --attach, "
                    "end it with --stop."
                ) from None
            with self._writable():
                self._status_file.unlink(missing_ok=True)
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            yield
            file.truncate(0)

    def pid(self) -> int | None:
        """The process that runs the sweep now, if any."""
        with suppress(OSError), open(self._pid_file, "rb", opener=_open_at_once) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                match = _PID.fullmatch(file.read(_LONGEST_PID))
                return int(match[0]) if match else None
        return None

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace the status by a newer one, where there is room; a sweep that nobody can watch goes on."""
        temporary = self._status_file.with_suffix(".new")
        with suppress(OSError):
            temporary.write_bytes(orjson.dumps(status))
            temporary.replace(self._status_file)

    def read_status(self) -> dict[str, Any] | None:
        """The newest status; None when there is none that can be read."""
        try:
            with open(self._status_file, "rb", opener=_open_at_once) as file:
                status = orjson.loads(file.read(_LARGEST_STATUS))
        except (OSError, orjson.JSONDecodeError):
            return None
        return status if _is_status(status) else None

    def detach(self, command: Sequence[str]) -> int | None:
        """Run a command that begins this session, apart from this terminal; returns its exit code if it has ended."""
        with self._writable(), self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            if self.pid() == process.pid and self.read_status() is not None:
                return None
            time.sleep(_POLL_SECONDS)
        return process.poll()

    def stop(self) -> bool:
        """Ask the process that runs the sweep to stop, and wait until it has; whether there was one."""
        pid = self.pid()
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:  # it has ended since
            return False
        except PermissionError:
            raise SpecError(
                f"--stop: got process {pid}, which is another user's; expected one of this user. Stop it as that user."
            ) from None
        deadline = time.monotonic() + _STOP_SECONDS
        while self.pid() == pid:
            if time.monotonic() > deadline:
                raise SpecError(f"--stop: got no end of process {pid} in {_STOP_SECONDS:g} s; see {self.log}.")
            time.sleep(_POLL_SECONDS)
        return True

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Make the folder; a StoreError for what the system refuses then and inside."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise StoreError(
                f"{self.folder}: got {error.strerror or error}; expected a folder that can be written, for the logs of "
                "this sweep. Mend that, or set XDG_STATE_HOME to another place."
            ) from None

    @property
    def _pid_file(self) -> Path:
        return self.folder / "pid"

    @property
    def _status_file(self) -> Path:
        return self.folder / "status.json"


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; one that is a pipe is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _is_status(status: object) -> bool:
    """Whether plain data is a status as an engine shows it: `counts`, and `workers` with what is told of each."""
    if not isinstance(status, dict):
        return False
    counts, workers = status.get("counts"), status.get("workers")
    return (
        isinstance(counts, dict)
        and all(type(count) is int for count in counts.values())
        and "complete" in counts
        and isinstance(workers, list)
        and all(isinstance(worker, dict) and {"device", "run", "note"} <= set(worker) for worker in workers)
    )


def session_of(sweep: str, store: str) -> Session:
    """The session of a sweep and a store on this machine, wherever it is asked from.

    Raises: StoreError where the user has no home.
    """
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if state.startswith("~"):
        raise StoreError(
            f"home: got none for user {os.getuid()}; expected a folder for the logs of sweeps. Set HOME, or "
            "XDG_STATE_HOME."
        )
    digest = hashlib.sha256(resolve_location(store).encode()).hexdigest()[:8]
    # The digest at its end tells it from others; a file's whole name, and the digests, could be longer than a folder's.
    return Session(Path(state) / "icl" / "sweeps" / f"{sweep[-_LONGEST_NAME:]}-{digest}")
