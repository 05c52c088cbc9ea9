"""Publishing in local folders and in memory, and what the operating system's errors mean."""

import errno
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from icl.io.errors import CheckpointError, MissingObjectError, StoreError, TransientStoreError

TEMPORARY = ".tmp-"
_LEFTOVER = re.compile(r"\.tmp-(?P<host>.+)-(?P<pid>[1-9]\d{0,8})-[0-9a-f]{16}")
_ABANDONED_AFTER = 86_400.0  # seconds; no writer takes a day over one object
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EMLINK}  # from opening links, sockets, absent devices
_KINDS: dict[Callable[[int], bool], str] = {
    stat.S_ISLNK: "a link",
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
}
_memory_lock = threading.Lock()
_FREE_SPACE = "Free some space and run again: what was saved is intact."
_EXPLANATIONS: dict[int, tuple[type[StoreError], str]] = {
    errno.ENOENT: (MissingObjectError, "Check the store and the run's name."),
    errno.EACCES: (StoreError, "Check the permissions."),
    errno.EPERM: (StoreError, "Check the permissions."),
    errno.EROFS: (StoreError, "Choose a store that can be written."),
    errno.ENOTDIR: (StoreError, "A file is where a folder should be; choose another store."),
    errno.ENOTSUP: (StoreError, "Objects cannot be created exclusively there; choose another filesystem."),
    errno.ENOSPC: (TransientStoreError, _FREE_SPACE),
    errno.EDQUOT: (TransientStoreError, _FREE_SPACE),
    errno.EFBIG: (TransientStoreError, _FREE_SPACE),
}
_OTHERWISE = (TransientStoreError, "What was saved before is intact; mend the cause and run again.")


def explain(error: Exception) -> tuple[type[StoreError], str, str]:
    """The class, the reason and the remedy of an error of the operating system."""
    code = getattr(error, "errno", None) or (errno.ENOENT if isinstance(error, FileNotFoundError) else 0)
    strerror = getattr(error, "strerror", None)
    reason = strerror or (os.strerror(code) if code else str(error) or type(error).__name__)
    kind, remedy = _EXPLANATIONS.get(code, _OTHERWISE)
    return kind, reason.lower(), remedy


def read(files: LocalFileSystem, path: str, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit`; nothing else is read, since it may never end or lead elsewhere.

    Raises: CheckpointError for a link, a folder, a pipe, a device, a socket, or a larger file.
    """
    try:
        # Without O_NONBLOCK a pipe waits for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_A_FILE and not stat.S_ISREG(os.lstat(path).st_mode):
            raise _irregular(path, os.lstat(path).st_mode) from None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _irregular(path, found.st_mode)
        if found.st_size > limit:
            raise too_large(path, limit)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def too_large(path: str, limit: int) -> CheckpointError:
    """What is said of an object of more than `limit` bytes."""
    return CheckpointError(f"{path}: got more than {limit} bytes; expected at most those. It is damaged or foreign.")


def move(files: LocalFileSystem, path: str, to: str) -> None:
    """Rename a file of any kind."""
    _make_folders(os.path.dirname(to))
    shutil.move(path, to)


def _irregular(path: str, mode: int) -> CheckpointError:
    kind = next((word for test, word in _KINDS.items() if test(mode)), "a device")
    return CheckpointError(f"{path}: got {kind}; expected a regular file. Put the file itself there, or move it away.")


def create(files: LocalFileSystem, path: str, data: bytes) -> bool:
    """Write aside, flush to disk, then link: a hard link appears whole and fails if the name is taken."""
    aside = _write_aside(path, data)
    published = True
    try:
        os.link(aside, path)
    except FileExistsError:
        published = False
    except OSError as error:
        if error.errno in _NO_HARD_LINKS:
            raise OSError(errno.ENOTSUP, "a filesystem without hard links") from error
        raise
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)
    _flush_folder(os.path.dirname(path))  # also when another writer was first: it may have died before its own flush
    return published


def replace(files: LocalFileSystem, path: str, data: bytes) -> None:
    """Write aside, then rename over what is there."""
    aside = _write_aside(path, data)
    try:
        os.replace(aside, path)
    except OSError:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        raise


def discard_leftovers(folder: str) -> None:
    """Remove what writers left unfinished in a folder when they are dead on this host or a day late."""
    for leftover in Path(folder).glob(f"{TEMPORARY}*"):
        writer = _LEFTOVER.fullmatch(leftover.name)
        if writer is None:
            continue
        dead = writer["host"] == socket.gethostname() and not _alive(int(writer["pid"]))
        with suppress(OSError):
            if dead or time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER:
                leftover.unlink()


def create_in_memory(files: MemoryFileSystem, path: str, data: bytes) -> bool:
    """Publish in this process's memory unless something is there."""
    with _memory_lock:
        if files.exists(path):
            return False
        files.pipe_file(path, data)
        return True


def _write_aside(path: str, data: bytes) -> str:
    """A finished and flushed temporary file in the folder of `path`."""
    folder = os.path.dirname(path)
    _make_folders(folder)
    aside = f"{folder}/{TEMPORARY}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    return aside


def _make_folders(folder: str) -> None:
    if not os.path.isdir(folder):
        parent = os.path.dirname(folder)
        _make_folders(parent)
        with suppress(FileExistsError):
            os.mkdir(folder)
        _flush_folder(parent)


def _flush_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
