"""Stores: what is published, listed, refused, and said when something is wrong."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from icl.io import local
from icl.io import store as store_module
from icl.io.errors import MissingObjectError, StoreError
from icl.io.store import Store, open_store


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


def test_an_object_is_created_once_and_never_overwritten(store: Store) -> None:
    assert store.create("run/a", b"first")
    assert not store.create("run/a", b"second")
    assert store.read("run/a") == b"first"


def test_another_handle_sees_a_new_object_at_once(store_url: str) -> None:
    """Fault 65: a listing is never answered from a cache."""
    reader, writer = open_store(store_url), open_store(store_url)
    writer.create("run/step-1", b"")
    assert reader.list("run") == ["step-1"]
    writer.create("run/step-2", b"")
    assert reader.list("run") == ["step-1", "step-2"]


def test_a_listing_holds_the_names_directly_under_a_folder(store: Store) -> None:
    for path in ("b/deep/x", "b/y", "a"):
        store.create(path, b"")
    assert store.list() == ["a", "b"]
    assert store.list("b") == ["deep", "y"]
    assert store.list("nothing") == []


def test_a_deletion_may_be_repeated(store: Store) -> None:
    store.create("a", b"")
    store.delete("a")
    store.delete("a")
    assert store.list() == []


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "..", "a/../../b", "./a", "a\\b", "a\0b"])
def test_a_path_cannot_leave_the_store(store: Store, path: str) -> None:
    for operation in (store.read, store.delete, lambda p: store.create(p, b"")):
        with pytest.raises(StoreError, match="expected relative parts"):
            operation(path)


def test_a_missing_object_is_named(store: Store) -> None:
    with pytest.raises(MissingObjectError, match=r"run/a: got no such .*; expected .* Check the .*store"):
        store.read("run/a")


@pytest.mark.parametrize("url", ["nosuch://x", "gs://", "gs:///x", "gs://bucket//x", "a\0b"])
def test_a_url_that_says_nothing_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="expected a local path or an fsspec URL"):
        open_store(url)


class Careful(MemoryFileSystem):  # type: ignore[misc]
    """Creates exclusively, as s3fs does."""

    protocol = "careful"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        super().pipe_file(path, value)


class Careless(MemoryFileSystem):  # type: ignore[misc]
    """Knows the word and ignores it."""

    protocol = "careless"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
        super().pipe_file(path, value)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that creates exclusively, and one that only says so."""
    # Both are made of the filesystem in memory, which is known by its class.
    monkeypatch.setattr(store_module, "MemoryFileSystem", type("Memory", (), {}))
    for kind in (Careful, Careless):
        fsspec.register_implementation(str(kind.protocol), kind, clobber=True)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("url", ["simplecache::memory://x", "data://x", "careless://x"])
def test_a_filesystem_that_cannot_create_exclusively_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="cannot create an object only if it is absent; expected a local path"):
        open_store(url)


@pytest.mark.usefixtures("others")
def test_any_filesystem_that_creates_exclusively_will_do() -> None:
    store = open_store("careful://x")
    assert store.create("run/a", b"1")
    assert not store.create("run/a", b"2")
    assert (store.read("run/a"), store.list()) == (b"1", ["run"])
    with pytest.raises(MissingObjectError):
        store.read("run/b")


def test_many_reads_come_in_order(store: Store) -> None:
    paths = [f"run/{index}" for index in range(70)]
    for path in paths:
        store.create(path, path.encode())
    assert list(store.map(store.read, paths)) == [path.encode() for path in paths]


def test_a_missing_root_is_an_error_unless_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        open_store(str(tmp_path / "typo"), create=False)
    assert not (tmp_path / "typo").exists()


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StoreError, match="A file is where a folder should be"):
        open_store(str(tmp_path)).create("run/a", b"")


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EACCES, "Check the permissions"),
        (errno.ENOSPC, "Free some space"),
        (errno.EDQUOT, "Free some space"),
        (errno.EROFS, "Choose a store that can be written"),
    ],
)
def test_a_refusal_by_the_system_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreError, match=rf"a: got {os.strerror(code).lower()}; expected .* {remedy}"):
        open_store(str(tmp_path)).create("a", b"")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_filesystem_without_hard_links_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=r"without hard links; .* another filesystem"):
        open_store(str(tmp_path)).create("a", b"")


def test_only_abandoned_leftovers_are_removed(tmp_path: Path) -> None:
    """A killed writer's temporary is unlisted, then removed; a live writer's, and what is not ours, stays."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host, tail = socket.gethostname(), "0123456789abcdef"
    names = {
        "dead": f".tmp-{host}-{ended.pid}-{tail}",
        "live": f".tmp-{host}-{os.getpid()}-{tail}",
        "elsewhere": f".tmp-{host}x-{ended.pid}-{tail}",
        "late": f".tmp-{host}x-1-{tail}",
        "foreign": ".tmp-notes",
    }
    for name in names.values():
        (tmp_path / name).touch()
    past = (tmp_path / names["late"]).stat().st_mtime - local._ABANDONED_AFTER - 60
    os.utime(tmp_path / names["late"], (past, past))
    store = open_store(str(tmp_path))
    assert store.list() == []
    store.discard_leftovers("sub")
    (tmp_path / "sub").mkdir()
    for name in names.values():
        (tmp_path / name).rename(tmp_path / "sub" / name)
    store.discard_leftovers("sub")
    assert sorted(os.listdir(tmp_path / "sub")) == sorted(names[key] for key in ("live", "elsewhere", "foreign"))
