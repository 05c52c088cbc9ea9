"""Who trains a run: refusal while the owner lives, takeover when it is dead, and never two at once by design."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from icl.io import owner, presence
from icl.io.errors import CheckpointError, RunOwnedError, StoreConflictError, StoreError, TransientStoreError
from icl.io.owner import owned, read_heartbeat
from icl.io.store import Store, open_store

EVERY = 0.5  # seconds; four times this without a beat is death, and a busy machine must not take so long over one
DEAD_EVERY = 0.05  # of one that is dead: nobody must be in time, and four times this are waited for


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


def beats(store: Store) -> list[str]:
    return store.list("run/owner")


def newest(store: Store) -> int:
    return max(int(name.removesuffix(".json")) for name in beats(store))


def leave_heartbeat(store: Store, **changes: object) -> None:
    """What a process on another machine left when it was killed."""
    beat = {"every": DEAD_EVERY, "host": "gone", "token": "0" * 16, "pid": 1, "started": "2099-01-01T00:00:00+00:00"}
    store.create("run/owner/000000000007.json", orjson.dumps(beat | changes))


def of_the_first_version(pid: int) -> dict[str, object]:
    """What 0.1.0 wrote on this machine, whose table of processes it read."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"machine": f"{boot}/{os.readlink('/proc/self/ns/pid')}", "pid": pid, "pid_started": "1"}


def take_over(store: Store) -> None:
    """What another process does that believes the owner dead; the owner may be about to publish the same number."""
    while not store.create(f"run/owner/{newest(store) + 1:012d}.json", b"{}"):
        pass


def test_an_owner_leaves_nothing(store: Store) -> None:
    with owned(store, "run", every=EVERY) as ownership:
        assert newest(store) >= 1
        assert not ownership.lost
    assert beats(store) == []


@pytest.mark.parametrize("name", ["9" * 200, "９", "7", "000000000009.json.json"])
def test_a_name_that_is_no_epoch_is_nobodys(store: Store, name: str) -> None:
    store.create(f"run/owner/{name}.json", b"{}")
    with owned(store, "run", every=EVERY):
        assert "000000000001.json" in beats(store)


def test_a_second_is_refused_and_told_who_owns_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = pytest.raises(RunOwnedError, match="that this process trains already")
    with owned(store, "run", every=EVERY), ours, owned(store, "run", every=9.0):
        pass
    monkeypatch.setattr(presence, "is_ours", lambda token: False)  # as another process sees it
    pattern = rf"s ago or less from process {os.getpid()} on .*; expected no other process .* Nothing is wrong"
    with owned(store, "run", every=EVERY), pytest.raises(RunOwnedError, match=pattern), owned(store, "run", every=9.0):
        pass
    with owned(store, "run", every=EVERY):
        pass


def test_a_silent_owner_is_taken_over_without_anybodys_clock(store: Store) -> None:
    """Its clock is decades ahead, and its machine another."""
    leave_heartbeat(store)
    begun = time.monotonic()
    with owned(store, "run", every=EVERY):
        assert time.monotonic() - begun >= 4 * DEAD_EVERY
        assert newest(store) >= 8


def test_a_process_that_ended_on_this_machine_is_not_waited_for(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    script = """
import os, signal
from icl.io.presence import announced
with announced() as process:
    print(process.token, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    leave_heartbeat(store, token=killed.stdout.strip(), every=60)
    assert read_heartbeat(store, "run").process == "ended"
    with caplog.at_level(logging.INFO), owned(store, "run", every=EVERY):
        assert newest(store) >= 8
    assert "watching" not in caplog.text
    os.unlink(presence._path(killed.stdout.strip()))


def test_a_living_owner_that_cannot_be_seen_is_let_be(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's behind a hidden /proc, or another container's, on the same machine."""
    monkeypatch.setattr(owner, "_SILENT_INTERVALS", 400)  # a busy machine is silent for long
    monkeypatch.setattr(presence, "is_ours", lambda token: False)
    with owned(store, "run", every=EVERY) as ownership:
        monkeypatch.setattr(presence, "look", lambda token: "unknown")
        with pytest.raises(RunOwnedError, match=f"process {os.getpid()} on"), owned(store, "run", every=EVERY):
            pass
        assert not ownership.lost


def test_a_living_owner_of_the_first_version_that_cannot_be_seen_is_let_be(store: Store) -> None:
    """It overwrites one heartbeat, which says that it is on this machine, where there is no such process."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    done = threading.Event()

    def live() -> None:
        count = 0
        while not done.wait(EVERY):
            count += 1
            beat = {"every": 60, "token": "0" * 16, "count": count, **of_the_first_version(ended.pid)}
            store._files.pipe_file(store._at("run/owner/000000000007.json"), orjson.dumps(beat))

    leave_heartbeat(store, **of_the_first_version(ended.pid), every=60)
    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(RunOwnedError, match=f"process {ended.pid} on"), owned(store, "run", every=EVERY):
            pass
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"every": -1}', b'{"every": "x"}', b"\xff"])
def test_a_damaged_heartbeat_is_watched_like_any(store: Store, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_DEFAULT_INTERVAL", DEAD_EVERY)
    store.create("run/owner/000000000001.json", data)
    begun = time.monotonic()
    with owned(store, "run", every=EVERY):
        assert newest(store) >= 2
        assert time.monotonic() - begun >= 4 * DEAD_EVERY


def test_asked_to_stop_while_watching(store: Store) -> None:
    leave_heartbeat(store, every=60)
    with owned(store, "run", every=EVERY, should_stop=lambda: True) as ownership:
        assert ownership.lost
    assert beats(store) == ["000000000007.json"]


def test_an_owner_learns_that_it_was_taken_over(store: Store) -> None:
    with owned(store, "run", every=EVERY) as ownership:
        take_over(store)
        deadline = time.monotonic() + 60
        while not ownership.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ownership.lost
    (left,) = beats(store)
    assert store.read(f"run/owner/{left}") == b"{}"


@pytest.mark.parametrize("error", [StoreError, TransientStoreError, CheckpointError, StoreConflictError])
@pytest.mark.parametrize("overtaken", [False, True])
def test_storage_that_fails_since_another_took_over_is_another_owner(
    store: Store, error: type[Exception], overtaken: bool
) -> None:
    """Two that both think they own a run: what one meets then is not a fault of the store."""
    expected = RunOwnedError if overtaken else error
    with pytest.raises(Exception, match="by order") as raised, owned(store, "run", every=60):  # noqa: PT012
        if overtaken:
            take_over(store)
        raise error("by order")
    assert type(raised.value) is expected
    assert len(beats(store)) == int(overtaken)


def test_an_owner_lets_go_also_where_nothing_may_be_removed(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one begins at once, on whatever machine, and only one warning is said."""

    def refuse(self: Store, path: str) -> None:
        raise StoreError("no deletion.")

    monkeypatch.setattr(Store, "delete", refuse)
    monkeypatch.setattr(presence, "look", lambda token: "unknown")
    monkeypatch.setattr(owner, "_SILENT_INTERVALS", 4000)  # a busy machine is silent for long
    beaten = threading.Semaphore(0)
    create = Store.create

    def count(self: Store, path: str, data: bytes) -> bool:
        beaten.release()
        return create(self, path, data)

    monkeypatch.setattr(Store, "create", count)
    for _ in range(3):
        with caplog.at_level(logging.INFO), owned(store, "run", every=0.05) as ownership:
            for _ in range(4):
                assert beaten.acquire(timeout=60)
            with pytest.raises(RunOwnedError), owned(store, "run", every=EVERY):
                pass
            assert not ownership.lost
    assert read_heartbeat(store, "run").process == "ended"
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert messages == ["no deletion. It stays, as does whatever else cannot be removed there."]


def test_what_a_dead_store_left_of_this_process_is_not_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker of a sweep comes back to a run whose heartbeat it could not remove."""

    def refuse(self: Store, path: str, data: bytes = b"") -> bool:
        raise TransientStoreError("by order.")

    with owned(store, "run", every=60):
        monkeypatch.setattr(Store, "delete", refuse)
        monkeypatch.setattr(Store, "create", refuse)
    monkeypatch.undo()
    assert len(beats(store)) == 1
    token = str(read_heartbeat(store, "run").owner["token"])
    with caplog.at_level(logging.INFO), owned(store, "run", every=60):
        assert read_heartbeat(store, "run").process == "alive"
    assert "watching" not in caplog.text
    assert beats(store) == []
    os.unlink(presence._path(token))


def test_an_answer_that_was_lost_is_not_another_owner(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat was published, the request failed all the same, and the next one finds its number taken."""
    create, beaten = Store.create, threading.Semaphore(0)
    failures = iter([False, True, True] * 3)

    def lose(self: Store, path: str, data: bytes) -> bool:
        create(self, path, data)
        beaten.release()
        if next(failures, False):
            raise TransientStoreError("the answer was lost.")
        return False

    monkeypatch.setattr(Store, "create", lose)
    with owned(store, "run", every=0.05) as ownership:
        for _ in range(11):
            assert beaten.acquire(timeout=60)
        assert not ownership.lost
    monkeypatch.undo()
    assert beats(store) == []


def test_eight_at_once_have_one_owner(store: Store) -> None:
    gate, inside, refused = threading.Barrier(8), threading.Lock(), threading.Semaphore(0)

    def train(_: int) -> str:
        gate.wait()
        try:
            with owned(store, "run", every=EVERY):
                assert inside.acquire(blocking=False)
                for _ in range(7):
                    assert refused.acquire(timeout=60)
                inside.release()
        except RunOwnedError:
            refused.release()
            return "refused"
        return "trained"

    with ThreadPoolExecutor(8) as pool:
        ends = sorted(pool.map(train, range(8)))
    assert ends == ["refused"] * 7 + ["trained"]


def test_heartbeats_that_fail_are_said_once_and_stop_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Semaphore(0)

    def fail(self: Store, path: str, data: bytes) -> bool:
        failed.release()
        raise TransientStoreError("by order.")

    with caplog.at_level(logging.WARNING), owned(store, "run", every=EVERY) as ownership:
        monkeypatch.setattr(Store, "create", fail)
        for _ in range(3):
            assert failed.acquire(timeout=60)
        assert not ownership.lost
    assert [record.getMessage() for record in caplog.records] == ["by order. Training goes on without a heartbeat."]


def test_nothing_is_published_or_asked_when_off(store: Store) -> None:
    with owned(store, "run", every=None), owned(store, "run", every=None):
        assert store.list() == []


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "icl-heartbeat"]
