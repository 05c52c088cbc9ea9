"""Who trains a run: refusal while the owner lives, takeover when it is dead, and never two at once by design."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import orjson
import pytest

from icl.io import owner
from icl.io.errors import RunOwnedError, TransientStoreError
from icl.io.owner import owned
from icl.io.store import Store, open_store

EVERY = 0.5  # seconds; four times this without a beat is death, and a busy machine must not take so long over one
DEAD_EVERY = 0.05  # of one that is dead: nobody must be in time, and four times this are waited for


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


def beats(store: Store) -> list[str]:
    return store.list("run/owner")


def leave_heartbeat(store: Store, **changes: object) -> None:
    """What a process on another machine left when it was killed."""
    beat = {"every": DEAD_EVERY, "host": "gone", "machine": "another", "pid": 1, "started": "2099-01-01T00:00:00+00:00"}
    store.create("run/owner/000000000007.json", orjson.dumps(beat | changes))


def test_an_owner_leaves_nothing(store: Store) -> None:
    with owned(store, "run", every=EVERY) as ownership:
        assert len(beats(store)) == 1
        assert not ownership.lost
    assert beats(store) == []


def test_a_second_is_refused_and_told_who_owns_it(store: Store) -> None:
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
        assert beats(store) == ["000000000008.json"]


def test_a_process_that_ended_on_this_machine_is_not_waited_for(store: Store) -> None:
    script = "from icl.io.owner import _this_process; import orjson; print(orjson.dumps(_this_process()).decode())"
    ended = orjson.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    leave_heartbeat(store, **ended, every=60)
    with owned(store, "run", every=EVERY):
        assert beats(store) == ["000000000008.json"]


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"every": -1}', b'{"every": "x"}', b"\xff"])
def test_a_damaged_heartbeat_is_watched_like_any(store: Store, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_DEFAULT_INTERVAL", DEAD_EVERY)
    store.create("run/owner/000000000001.json", data)
    with owned(store, "run", every=EVERY):
        assert beats(store) == ["000000000002.json"]


def test_asked_to_stop_while_watching(store: Store) -> None:
    leave_heartbeat(store, every=60)
    with owned(store, "run", every=EVERY, should_stop=lambda: True) as ownership:
        assert ownership.lost
    assert beats(store) == ["000000000007.json"]


def test_an_owner_learns_that_it_was_taken_over(store: Store) -> None:
    with owned(store, "run", every=EVERY) as ownership:
        store.create("run/owner/000000000002.json", b"{}")
        deadline = time.monotonic() + 60
        while not ownership.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ownership.lost
    assert beats(store) == ["000000000002.json"]


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

    def fail(self: Store, path: str, data: bytes) -> None:
        failed.release()
        raise TransientStoreError("by order.")

    monkeypatch.setattr(Store, "replace", fail)
    with caplog.at_level(logging.WARNING), owned(store, "run", every=EVERY) as ownership:
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
