"""Publishing in local folders and in memory, and what the operating system's errors mean."""

import errno
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import suppress

from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from icl.io import presence
from icl.io.errors import CheckpointError, MissingObjectError, StoreError, TransientStoreError

TEMPORARY = ".tmp-"
# The writer is a token of icl.io.presence; 0.1.0 wrote its host and process instead, which prove nothing.
_LEFTOVER = re.compile(r"\.tmp-(?P<writer>[0-9a-f]{16}|.+-[1-9]\d{0,8})-[0-9a-f]{16}")
_ABANDONED_AFTER = 86_400.0  # seconds; no writer takes a day over one object
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EMLINK}  # from opening links, sockets, absent devices
_KINDS: dict[Callable[[int], bool], str] = {
    stat.S_ISLNK: "a link",
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
}
_LONGEST_PATH = 4096  # bytes
_memory_lock = threading.Lock()
_FREE_SPACE = "Free some space and run again: what was saved is intact."
_EXPLANATIONS: dict[int, tuple[type[StoreError], str]] = {
    errno.ENOENT: (MissingObjectError, "Check the store and the run's name."),
    errno.EACCES: (StoreError, "Check the permissions."),
    errno.EPERM: (StoreError, "Check the permissions."),
    errno.EROFS: (StoreError, "Choose a store that can be written."),
    errno.ENOTDIR: (StoreError, "A file is where a folder should be; choose another store."),
    errno.EEXIST: (StoreError, "A file is where a folder should be; choose another store."),
    errno.ENAMETOOLONG: (StoreError, "Choose a shorter name."),
    errno.ELOOP: (StoreError, "A link leads back to itself; mend it."),
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


def make_root(folder: str) -> None:
    """Make the folder of a store, which may be there."""
    if len(os.fsencode(folder)) >= _LONGEST_PATH:  # which Python's own would find out by recursion
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    os.makedirs(folder, exist_ok=True)


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
            return file.read(found.st_size)  # not the limit, for which room would be made
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
        _remove(aside)
    _flush_folder(os.path.dirname(path))  # also when another writer was first: it may have died before its own flush
    return published


def discard_leftovers(folder: str) -> None:
    """Remove what writers left unfinished in a folder when they are known to have ended, or are a day late.

    The day is by the clock of the filesystem, which may be another machine's.
    """
    for name in _leftovers(folder):
        leftover = f"{folder}/{name}"
        writer = _LEFTOVER.fullmatch(name)
        with suppress(OSError):
            if writer and (presence.look(writer["writer"]) == "ended" or _age(leftover) > _ABANDONED_AFTER):
                os.unlink(leftover)


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
    aside = _temporary(folder)
    try:
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        _remove(aside)
        raise
    return aside


def _temporary(folder: str) -> str:
    return f"{folder}/{TEMPORARY}{presence.this_process()}-{secrets.token_hex(8)}"


def _remove(aside: str) -> None:
    """What cannot be removed stays: what counts has another name."""
    with suppress(OSError):
        os.unlink(aside)


def _leftovers(folder: str) -> list[str]:
    with suppress(OSError):
        return [name for name in os.listdir(folder) if name.startswith(TEMPORARY)]
    return []


def _age(path: str) -> float:
    """Seconds since a file was last written, compared with one that is written now beside it."""
    now = _temporary(os.path.dirname(path))
    with open(now, "xb"):
        pass
    try:
        return os.stat(now).st_mtime - os.stat(path).st_mtime
    finally:
        _remove(now)


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
