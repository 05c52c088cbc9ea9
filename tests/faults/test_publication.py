"""Publication under races, kills and failing storage calls: nothing torn, nothing lost, nothing overwritten."""

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.spec import Spec, TrainingSpec
from icl.io import store as store_module
from icl.io.errors import StoreConflictError, StoreError
from icl.io.rundir import open_run
from icl.io.store import open_store
from icl.io.tensors import publish
from tests.trees import METADATA, params, state

SPEC = Spec(task=LinearTask(task_dim=2, num_examples=2), training=TrainingSpec(total_steps=4))


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_eight_threads_have_one_winner(store_url: str) -> None:
    store = open_store(store_url)
    for attempt in range(20):
        gate = threading.Barrier(8)

        def write(writer: int, path: str = f"run/{attempt}", gate: threading.Barrier = gate) -> bool:
            gate.wait()
            return open_store(store_url).create(path, bytes([writer]) * 5000)

        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(write, range(8)))
        assert created.count(True) == 1
        assert store.read(f"run/{attempt}") == bytes([created.index(True)]) * 5000


@pytest.mark.parametrize("differ", [False, True])
def test_eight_threads_publish_equal_tensors_or_conflict(store_url: str, differ: bool) -> None:
    def write(writer: int) -> str:
        try:
            publish(open_store(store_url), "run/a", {"x": torch.full((9,), float(writer * differ))}, {})
        except StoreConflictError:
            return "conflict"
        return "published"

    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(write, range(8)))
    assert ends.count("conflict") == (7 if differ else 0)


RACER = """
import sys
from icl.io.store import open_store
store, writer = open_store(sys.argv[1]), sys.argv[2].encode()
print("ready", flush=True)
sys.stdin.readline()
print(*(int(store.create(f"run/{i}", writer * 50_000)) for i in range(50)), flush=True)
"""


def test_four_processes_have_one_winner(tmp_path: Path) -> None:
    racers = [python(RACER, str(tmp_path), str(writer)) for writer in range(4)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    created = [racer.communicate(timeout=60)[0].split() for racer in racers]
    store = open_store(str(tmp_path))
    for index in range(50):
        (winner,) = (writer for writer in range(4) if created[writer][index] == "1")
        assert store.read(f"run/{index}") == str(winner).encode() * 50_000


WRITER = """
import itertools, sys
from icl.io.store import open_store
store = open_store(sys.argv[1])
for i in itertools.count(int(sys.argv[2])):
    store.create(f"run/{i}", str(i % 10).encode() * 300_000)
    print(i, flush=True)
"""


def test_a_killed_writer_leaves_no_torn_object(tmp_path: Path) -> None:
    """Faults 45 and 73: SIGKILL at random instants; whatever has its name is whole, and leftovers go away."""
    store = open_store(str(tmp_path))
    chance = random.Random(0)
    following = 0
    for _ in range(20):
        writer = python(WRITER, str(tmp_path), str(following))
        assert writer.stdout is not None
        writer.stdout.readline()
        instant = time.perf_counter() + chance.uniform(0, 0.02)
        while time.perf_counter() < instant:
            pass
        writer.kill()
        reported = writer.communicate()[0].split()
        names = store.list("run")
        assert set(reported) <= set(names)  # what was reported as published is there
        assert all(store.read(f"run/{name}") == str(int(name) % 10).encode() * 300_000 for name in names)
        following = max(map(int, names)) + 1
    store.discard_leftovers("run")
    assert not list((tmp_path / "run").glob(".tmp-*"))


SAVER = """
import os, random, signal, sys, time
import torch
from icl.core.spec import Spec, TrainingSpec
from icl.core.families.linear import LinearTask
from icl.io.rundir import open_run
from icl.io.store import open_store
from tests.trees import METADATA, state
torch.set_num_threads(1)
spec = Spec(task=LinearTask(task_dim=2, num_examples=2), training=TrainingSpec(total_steps=2**24))
chance = random.Random(0)
for _ in range(20):
    run = open_run(open_store(sys.argv[1]), spec)
    found = run.newest_state()
    step = found[0] if found else 0
    assert step == max(run.state_steps(), default=0), "the newest state is not intact"
    assert found is None or found[1]["params"].eq(step).all()
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            run.save_state(step, state(spec, step), METADATA)
    instant = time.perf_counter() + chance.uniform(0.01, 0.06)
    while time.perf_counter() < instant:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(step, max(run.state_steps()))
"""


def test_a_killed_trainer_resumes_from_its_highest_step(tmp_path: Path) -> None:
    """Fault 45: 20 kills during saves; the newest state is intact each time, with no fallback needed."""
    saver = python(SAVER, str(tmp_path))
    first, last = map(int, saver.communicate(timeout=120)[0].split())
    assert saver.returncode == 0
    assert 0 < first <= last


def test_a_reader_never_sees_a_short_object(tmp_path: Path) -> None:
    """Fault 74: polled at its final name throughout 200 saves, an object is absent or whole."""
    store, size, done = open_store(str(tmp_path)), 200_000, threading.Event()
    current = [0]

    def poll() -> set[int]:
        seen = set()
        while not done.is_set():
            try:
                seen.add((tmp_path / "run" / str(current[0])).stat().st_size)
            except FileNotFoundError:
                seen.add(-1)
        return seen

    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(poll)
        for current[0] in range(200):
            store.create(f"run/{current[0]}", bytes(size))
        done.set()
    assert seen.result() <= {-1, size}


def fail_at(nth: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but its nth call raises as a dying disk does."""
    calls = [0]

    def failing(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*arguments, **options)

    return failing


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("call", ["open", "write", "fsync", "link", "unlink", "mkdir"])
def test_any_failing_call_leaves_the_old_state_and_a_retry_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    """Each storage call fails in turn: step 1 still loads, and saving step 2 again succeeds."""
    run = open_run(open_store(str(tmp_path)), SPEC)
    run.save_state(1, state(SPEC, 1), METADATA)
    with monkeypatch.context() as patch:
        if call in ("open", "write"):
            real_open = open

            def opened(*arguments: Any, **options: Any) -> Any:
                file = real_open(*arguments, **options)
                return file if call == "open" else _FullDisk(file, fail)

            fail = fail_at(nth, lambda: None)
            replacement = fail_at(nth, opened) if call == "open" else opened
            patch.setattr(store_module, "open", replacement, raising=False)
        else:
            patch.setattr(os, call, fail_at(nth, getattr(os, call)))
        with suppress(StoreError):  # a call that is made fewer than nth times does not fail
            run.save_segment(1, 2, torch.ones(1), {}, METADATA)
            run.save_state(2, state(SPEC, 2), METADATA)
            run.save_checkpoint(2, params(SPEC, 2), METADATA)
    found = run.newest_state()
    assert found is not None
    assert identical(found[1], state(SPEC, found[0]))
    run.save_segment(1, 2, torch.ones(1), {}, METADATA)
    run.save_state(2, state(SPEC, 2), METADATA)
    run.save_checkpoint(2, params(SPEC, 2), METADATA)
    assert run.state_steps() == [1, 2]
    assert run.metrics().keys() == {2}
    assert identical(run.load_checkpoint(2), params(SPEC, 2))


class _FullDisk:
    """A file whose write stores half of the bytes and then fails."""

    def __init__(self, file: Any, fail: Callable[[], None]) -> None:
        self._file, self._fail = file, fail

    def __enter__(self) -> "_FullDisk":
        return self

    def __exit__(self, *reason: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> None:
        self._file.write(data[: len(data) // 2])
        self._fail()
        self._file.write(data[len(data) // 2 :])


def test_a_small_and_a_large_object_go_through_the_same_door(store_url: str) -> None:
    """Faults 24 and 67: whole bytes in, no file object, no transaction, whatever the size."""
    store = open_store(store_url)
    for size in (10, 300 * 1024):
        store.create(f"run/{size}", b"x" * size)
        assert store.read(f"run/{size}") == b"x" * size
