"""Stores: what is published, listed, refused, and said when something is wrong."""

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from icl.io import local, presence
from icl.io import store as store_module
from icl.io.errors import CheckpointError, MissingObjectError, StoreError, TransientStoreError
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


def test_no_more_is_read_than_may_be_there(store: Store) -> None:
    for size in (0, 1, 30):
        store.create(f"run/{size}", bytes(size))
        assert store.read(f"run/{size}", size) == store.read(f"run/{size}") == bytes(size)
    with pytest.raises(CheckpointError, match="run/30: got more than 29 bytes"):
        store.read("run/30", 29)


def test_an_object_may_be_renamed_unread(store: Store) -> None:
    store.create("run/a", b"1")
    store.move("run/a", "run/aside/b")
    store.move("run/a", "run/aside/b")
    assert (store.list("run"), store.read("run/aside/b")) == (["aside"], b"1")


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "link to a file", "link to nothing", "link to a device"])
def test_only_a_regular_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Opening a pipe would wait for ever, and /dev/zero fill the memory."""
    store, path = open_store(str(tmp_path)), tmp_path / "a"
    (tmp_path / "file").write_bytes(b"1")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("a")
    else:
        path.symlink_to({"a file": "file", "nothing": "none", "a device": "/dev/zero"}[kind.removeprefix("link to ")])
    with pytest.raises(CheckpointError, match=rf"a: got a {kind.split()[0]}; expected a regular file"):
        store.read("a")
    store.move("a", "aside/a")
    assert store.create("a", b"2")


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


LEFT_BEHIND = """
import os, signal, sys
from icl.io import local
fsync = os.fsync
def die(descriptor):
    if ".tmp-" in os.readlink(f"/proc/self/fd/{descriptor}"):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = die
local.create(None, sys.argv[1], b"1")
"""
TAIL = "0123456789abcdef"


def left_by_killed_writer(folder: Path) -> tuple[str, int]:
    """The name of what a writer that was killed on this machine left, and its process."""
    writer = subprocess.Popen([sys.executable, "-c", LEFT_BEHIND, str(folder / "a")])
    writer.wait()
    (name,) = os.listdir(folder)
    return name, writer.pid


def test_only_what_is_known_to_be_abandoned_is_removed(tmp_path: Path) -> None:
    """What a writer on this machine left that was killed; not what one left that only cannot be seen."""
    folder = tmp_path / "run"
    folder.mkdir()
    dead, pid = left_by_killed_writer(folder)
    stay = {
        "live": f".tmp-{presence.this_process()}-{TAIL}",
        "elsewhere": f".tmp-{TAIL}-{TAIL}",  # another container's, with the host name and the processes of this one
        "of 0.1.0": f".tmp-{socket.gethostname()}-{pid}-{TAIL}",
        "foreign": ".tmp-notes",
    }
    for name in stay.values():
        (folder / name).touch()
    store = open_store(str(tmp_path))
    assert store.list("run") == []
    assert dead in os.listdir(folder)
    store.discard_leftovers("nothing there")
    store.discard_leftovers("run")
    assert sorted(os.listdir(folder)) == sorted(stay.values())
    os.unlink(presence._path(dead.split("-")[1]))


@pytest.mark.parametrize("years", [-20, 20], ids=["behind", "ahead"])
def test_a_day_is_told_by_the_clock_of_the_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    """Whatever this machine's says."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + years * 365 * 86_400)
    names = [f".tmp-{TAIL}-{TAIL}", f".tmp-some-host-17-{TAIL}", ".tmp-notes"]
    for age in (0.5, 1.5):  # of the limit
        for name in names:
            (tmp_path / name).touch()
            past = (tmp_path / name).stat().st_mtime - age * local._ABANDONED_AFTER
            os.utime(tmp_path / name, (past, past))
        local.discard_leftovers(str(tmp_path))
        assert sorted(os.listdir(tmp_path)) == sorted(names if age < 1 else [".tmp-notes"])


def test_leftovers_that_cannot_be_removed_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "run").mkdir()
    dead, _ = left_by_killed_writer(tmp_path / "run")
    store = open_store(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        store.discard_leftovers("run")
        assert store.create("run/a", b"1"), "nor is what a writer that lives cannot remove a fault"
    assert dead in os.listdir(tmp_path / "run")
    assert store.list("run") == ["a"]
    store.discard_leftovers("run")
    os.unlink(presence._path(dead.split("-")[1]))


@pytest.mark.parametrize("error", [StoreError, TransientStoreError])
def test_what_cannot_be_removed_is_said_once(
    store: Store, error: type[StoreError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def refuse(self: Store, path: str) -> None:
        asked.append(path)
        raise error("by order.")

    for path in ("run/a", "run/b"):
        store.create(path, b"")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", refuse)
        for path in ("run/a", "run/a", "run/b"):
            assert not store.discard(path)
    assert asked == (["run/a", "run/b"] if error is StoreError else ["run/a", "run/a", "run/b"])
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["by order. It stays, as does whatever else cannot be removed there."]
    assert store.list("run") == ["a", "b"]
    store.create("run/c", b"")
    assert store.discard("run/c")
    assert store.list("run") == ["a", "b"]
