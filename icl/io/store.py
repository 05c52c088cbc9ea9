"""A store: named byte objects that are published whole or not at all, and never overwritten."""

import errno
import hashlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from icl.io.errors import MissingObjectError, StoreConflictError, StoreError

_TEMPORARY = ".tmp-"
_LEFTOVER = re.compile(r"\.tmp-(?P<host>.+)-(?P<pid>[1-9]\d{0,8})-[0-9a-f]{16}")
_ABANDONED_AFTER = 86_400.0  # seconds; no writer takes a day over one object
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_memory_lock = threading.Lock()


@attrs.frozen
class Store:
    """Byte objects under one root. Paths are relative, with `/` between parts."""

    url: str
    _files: Any  # an fsspec filesystem
    _root: str
    _create: Callable[[Any, str, bytes], bool]

    def create(self, path: str, data: bytes) -> bool:
        """Publish `data` at `path` unless something is there; returns whether it was published.

        Law: whoever looks at `path`, whenever this process dies, sees nothing or all of one writer's bytes.
        """
        with self._errors(path):
            return self._create(self._files, self._at(path), data)

    def read(self, path: str) -> bytes:
        """The bytes at `path`. Raises MissingObjectError when there are none."""
        with self._errors(path):
            data: bytes = self._files.cat_file(self._at(path))
            return data

    def exists(self, path: str) -> bool:
        """Whether something is published at `path`."""
        with self._errors(path):
            return bool(self._files.exists(self._at(path)))

    def list(self, folder: str = "") -> list[str]:
        """The names directly under `folder`, sorted, never from a cache; unfinished objects are not there."""
        at = self._at(folder) if folder else self._root
        with self._errors(folder or "."):
            try:
                entries = self._files.ls(at, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = (entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries)
        return sorted(name for name in names if not name.startswith(_TEMPORARY))

    def delete(self, path: str) -> None:
        """Remove an object; it may already be gone."""
        with self._errors(path), suppress(FileNotFoundError):
            self._files.rm_file(self._at(path))

    def move(self, path: str, to: str) -> None:
        """Publish the object at `path` at `to` as well, then remove it from `path`; nothing is lost on the way.

        Raises: StoreConflictError when `to` holds other bytes; both stay.
        """
        data = self.read(path)
        if not self.create(to, data) and (present := self.read(to)) != data:
            raise StoreConflictError(
                f"{self.url}/{to}: got SHA-256 {hashlib.sha256(data).hexdigest()} from {path}; expected "
                f"{hashlib.sha256(present).hexdigest()}, published before. Both stay. Choose another name."
            )
        self.delete(path)

    def discard_leftovers(self, folder: str) -> None:
        """Remove what writers left unfinished in a local `folder` when they are dead on this host or a day late."""
        if not isinstance(self._files, LocalFileSystem):
            return
        for leftover in Path(self._at(folder)).glob(f"{_TEMPORARY}*"):
            writer = _LEFTOVER.fullmatch(leftover.name)
            if writer is None:
                continue
            dead = writer["host"] == socket.gethostname() and not _alive(int(writer["pid"]))
            with suppress(OSError):
                if dead or time.time() - leftover.stat().st_mtime > _ABANDONED_AFTER:
                    leftover.unlink()

    def _at(self, path: str) -> str:
        if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in path.split("/")):
            raise StoreError(
                f"{self.url}: got the path {path!r}; expected relative parts without '..'. Correct the name."
            )
        return f"{self._root}/{path}"

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            code = error.errno or (errno.ENOENT if isinstance(error, FileNotFoundError) else 0)
            remedy = {
                errno.ENOENT: "Check the store and the run's name.",
                errno.EACCES: "Check the permissions.",
                errno.EPERM: "Check the permissions.",
                errno.EROFS: "Choose a store that can be written.",
                errno.ENOSPC: "Free some space and run again: what was saved is intact.",
                errno.EDQUOT: "Free some space and run again: what was saved is intact.",
                errno.ENOTDIR: "A file is where a folder should be; choose another store.",
                errno.ENOTSUP: "Objects cannot be created exclusively there; choose a folder on another filesystem.",
            }.get(code, "What was saved before is intact; mend the cause and run again.")
            reason = error.strerror or (os.strerror(code) if code else str(error) or type(error).__name__)
            kind = MissingObjectError if code == errno.ENOENT else StoreError
            raise kind(f"{self.url}/{path}: got {reason.lower()}; expected a usable store. {remedy}") from error


def open_store(url: str, *, create: bool = True) -> Store:
    """The store at a local path or an fsspec URL.

    Args:
        create: make a local root that is not there; otherwise that is an error.

    Raises: StoreError when the URL is not understood, the root is missing, or creation is not exclusive there.
    """
    try:
        if "\0" in url:
            raise ValueError("no path can hold a NUL")
        files, root = fsspec.url_to_fs(url, use_listings_cache=False)
    except (ValueError, ImportError, OSError) as error:
        raise StoreError(f"store: got {url!r} ({error}); expected a local path or an fsspec URL. Correct it.") from None
    if isinstance(files, LocalFileSystem):
        store = Store(url, files, root, _create_local)
        with store._errors("."):
            if create:
                os.makedirs(root, exist_ok=True)
            elif not os.path.isdir(root):
                raise NotADirectoryError(errno.ENOENT, "no such folder")
        return store
    if isinstance(files, MemoryFileSystem):
        return Store(url, files, root.rstrip("/"), _create_in_memory)
    raise StoreError(
        f"store: got {url!r}; expected a local path or memory://, where icl can create objects exclusively. "
        "Choose one of those."
    )


def _create_local(files: LocalFileSystem, path: str, data: bytes) -> bool:
    """Write aside, flush to disk, then link: a hard link appears whole and fails if the name is taken."""
    folder = os.path.dirname(path)
    _make_folders(folder)
    aside = f"{folder}/{_TEMPORARY}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
    published = True
    try:
        with open(aside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
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
    _flush_folder(folder)  # also when another writer was first: it may have died before its own flush
    return published


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


def _create_in_memory(files: MemoryFileSystem, path: str, data: bytes) -> bool:
    with _memory_lock:
        if files.exists(path):
            return False
        files.pipe_file(path, data)
        return True


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
