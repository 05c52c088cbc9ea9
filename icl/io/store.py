"""A store: named byte objects that are published whole or not at all, and never overwritten."""

import errno
import inspect
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import attrs
import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from icl.io import gcs, local
from icl.io.calls import Calls, NoEndError
from icl.io.errors import StoreError, TransientStoreError
from icl.io.location import is_local, resolve_location

logger = logging.getLogger("icl")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_ENDS_IN_HASH = re.compile(r"-[0-9a-f]{16}$")  # as a run's name
LARGEST_DOCUMENT = 2**22  # bytes of a spec, a record or a heartbeat that is read


def _read_elsewhere(files: AbstractFileSystem, path: str, limit: int) -> bytes:
    """One request for a byte more than may be there, so that its size need not be asked for."""
    try:
        data: bytes = files.cat_file(path, start=0, end=limit + 1)
    except Exception as error:
        if str(getattr(error, "code", None)) == "416":  # Google Cloud Storage has no range of an empty object
            return b""
        raise
    if len(data) > limit:
        raise local.too_large(path, limit)
    return data


def _move_elsewhere(files: AbstractFileSystem, path: str, to: str) -> None:
    files.mv(path, to)


@attrs.frozen
class _Kind:
    """How one kind of filesystem publishes, what its failures are and mean, and how many requests it takes at once."""

    create: Callable[[Any, str, bytes], bool]
    failures: tuple[type[Exception], ...] = (OSError, ValueError)
    explain: Callable[[Exception], tuple[type[StoreError], str, str]] = local.explain
    concurrency: int = 1
    read: Callable[[Any, str, int], bytes] = _read_elsewhere
    move: Callable[[Any, str, str], None] = _move_elsewhere


@attrs.define
class _Tidying:
    """What could not be removed from a store, and whether that has been said."""

    refused: set[str] = attrs.field(factory=set)
    told: bool = False


@attrs.frozen
class Store:
    """Byte objects under one root. Paths are relative, with `/` between parts; `url` is as the user wrote it."""

    url: str
    _files: Any  # an fsspec filesystem
    _root: str
    _kind: _Kind
    _calls: Calls = attrs.field(factory=Calls, eq=False, repr=False)
    _tidying: _Tidying = attrs.field(factory=_Tidying, eq=False, repr=False)

    def create(self, path: str, data: bytes) -> bool:
        """Publish `data` at `path` unless something is there; returns whether it was published.

        Law: whoever looks at `path`, whenever this process dies, sees nothing or all of one writer's bytes. When an
        answer is lost on the way and the request repeated, False may be said of the caller's own bytes.
        """
        with self._errors(path):
            return self._calls.make(self._kind.create, self._files, self._at(path), data)

    def read(self, path: str, limit: int = LARGEST_DOCUMENT) -> bytes:
        """The bytes at `path`, at most `limit`, so that nobody's file fills the memory.

        Raises: MissingObjectError when there are none; CheckpointError when there are more, or it is no regular file.
        """
        with self._errors(path):
            return self._calls.make(self._kind.read, self._files, self._at(path), limit)

    def list(self, folder: str = "") -> list[str]:
        """The names directly under `folder`, sorted, never from a cache; unfinished objects are not there."""
        at = self._at(folder) if folder else self._root
        with self._errors(folder or "."):
            try:
                entries = self._calls.make(self._files.ls, at, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        names = {entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry.rstrip("/") != at}
        return sorted(name for name in names if not name.startswith(local.TEMPORARY))

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder, or a link to one: a listing of anything else is empty."""
        with self._errors(path):
            return bool(self._calls.make(self._files.isdir, self._at(path)))

    def move(self, path: str, to: str) -> None:
        """Rename an object, whatever it is and without reading it; it may already be gone."""
        with self._errors(path), suppress(FileNotFoundError):
            self._calls.make(self._kind.move, self._files, self._at(path), self._at(to))

    def delete(self, path: str) -> None:
        """Remove an object; it may already be gone."""
        with self._errors(path), suppress(FileNotFoundError):
            self._calls.make(self._files.rm_file, self._at(path))

    def discard(self, path: str) -> bool:
        """Remove an object that is no longer needed; whether it is gone.

        Only what cannot be saved stops a run: what cannot be removed stays, and that is said once.
        """
        if path in self._tidying.refused:
            return False
        try:
            self.delete(path)
        except StoreError as error:
            if not isinstance(error, TransientStoreError):
                self._tidying.refused.add(path)
            if not self._tidying.told:
                logger.warning("%s It stays, as does whatever else cannot be removed there.", error)
            self._tidying.told = True
            return False
        return True

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """`function` of each item, in order, as many at once as the store answers at once."""
        if self._kind.concurrency == 1:
            yield from map(function, items)
            return
        with ThreadPoolExecutor(self._kind.concurrency, thread_name_prefix="icl-store") as executor:
            yield from executor.map(function, items)

    def concurrency(self, most: int) -> int:
        """How many requests, up to `most`, it is worth having on their way at once."""
        return min(most, self._kind.concurrency)

    def discard_leftovers(self, folder: str) -> None:
        """Remove what dead writers left unfinished in a local `folder`; elsewhere nothing unfinished ever shows."""
        if isinstance(self._files, LocalFileSystem):
            with self._errors(folder):
                self._calls.make(local.discard_leftovers, self._at(folder))

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
        except NoEndError as error:
            raise TransientStoreError(
                f"{self.url}/{path}: got {error}; expected an answer. What was saved before is intact; mend the cause "
                "and run again to go on."
            ) from None
        except self._kind.failures as error:
            kind, reason, remedy = self._kind.explain(error)
            raise kind(f"{self.url}/{path}: got {reason}; expected a usable store. {remedy}") from error


def open_store(url: str, *, create: bool = True) -> Store:
    """The store at a local path or an fsspec URL where objects can be created exclusively.

    Args:
        create: make a local root that is not there; otherwise that is an error. A bucket must always be there.

    Raises: StoreError when the URL is not understood, cannot be reached, or creation is not exclusive there.
    """
    location = resolve_location(url)
    store = _reach(url, location)
    if create:
        _require_outside_runs(store)
    if is_local(location):
        with store._errors("."):
            if create:
                store._calls.make(local.make_root, location)
            elif not store._calls.make(os.path.isdir, location):
                raise NotADirectoryError(errno.ENOENT, "no such folder")
    elif store._kind.create is _create_elsewhere:
        _require_exclusive_creation(store)
    return store


def _reach(url: str, location: str) -> Store:
    if is_local(location):
        return Store(url, LocalFileSystem(), location, _Kind(local.create, read=local.read, move=local.move))
    try:
        if location.startswith("gs://"):
            return _open_gcs(url, location)
        files, root = fsspec.url_to_fs(location, use_listings_cache=False)
    except (ValueError, ImportError, OSError) as error:
        raise StoreError(f"store: got {url!r} ({error}); expected a local path or an fsspec URL. Correct it.") from None
    create = local.create_in_memory if isinstance(files, MemoryFileSystem) else _create_elsewhere
    return Store(url, files, root.rstrip("/"), _Kind(create))


def _require_outside_runs(store: Store) -> None:
    """Raise StoreError for a store inside a run, whose folders are the run's own."""
    folder = store._root
    while folder:
        above, _, name = folder.rpartition("/")
        if _ENDS_IN_HASH.search(name) and "spec.json" in attrs.evolve(store, root=folder).list():
            raise StoreError(
                f"store: got {store.url!r}, which is inside the run {name}; expected a folder of its own. Write the "
                "store that the run is in, or another."
            )
        folder = above


def _open_gcs(url: str, location: str) -> Store:
    root = location.removeprefix("gs://")
    if not root or "" in root.split("/"):
        raise ValueError("no bucket, or a folder without a name")
    gcs.prepare_gcsfs()
    kind = _Kind(gcs.create, gcs.failures(), gcs.explain, gcs.CONCURRENCY)
    with Store(url, None, root, kind)._errors("."):
        files = gcs.filesystem()
        gcs.check_bucket(files, root)
    return Store(url, files, root, kind)


def _create_elsewhere(files: AbstractFileSystem, path: str, data: bytes) -> bool:
    try:
        files.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    return True


def _require_exclusive_creation(store: Store) -> None:
    """Raise StoreError unless this filesystem has an exclusive create of its own and keeps to it in a trial."""
    kind = type(store._files)
    own = kind._pipe_file if isinstance(store._files, AsyncFileSystem) else kind.pipe_file
    # fsspec's general form looks first and writes later, which lets two writers through.
    exclusive = own is not AbstractFileSystem.pipe_file and "mode" in inspect.signature(own).parameters
    if exclusive:
        probe = f"icl-probe-{secrets.token_hex(8)}"
        exclusive = store.create(probe, b"1") and not store.create(probe, b"2") and store.read(probe) == b"1"
        store.discard(probe)
    if not exclusive:
        raise StoreError(
            f"store: got {store.url!r}, where {kind.__name__} cannot create an object only if it is absent; expected a "
            "local path, gs://, memory:// or a filesystem that can. Choose one of those."
        )
