"""Which run is next, and what becomes of one that an attempt has ended."""

import signal
import threading
import time
from pathlib import Path

import pytest

from icl.attempt import EXIT_BACKEND, EXIT_NON_FINITE, EXIT_OWNED, EXIT_SPEC, EXIT_STORE, Ending, Status
from icl.engines.work import Work, count_words, describe, pause_after
from icl.io.states import RunState, Word
from icl.io.store import open_store
from icl.io.sweepfile import expand_sweep

SWEEP = expand_sweep(
    {
        "base": {"task": {"task_dim": 2, "num_examples": 2}, "training": {"total_steps": 6}},
        "grid": {"seeds.init": [0, 1, 2]},
    }
)


def ending(code: int, status: Status = "failed") -> Ending:
    return Ending(code, "run", "store", None, status, error=None if code == 0 else "why")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icl.engines.work.pause_after", lambda failures: 0.0)


def work(tmp_path: Path, words: tuple[Word, ...] = ("pending",) * 3, **options: bool | int) -> Work:
    states = [RunState(m.name, word, 0, 6) for m, word in zip(SWEEP.members, words, strict=True)]
    return Work(open_store(str(tmp_path)), SWEEP.members, states, **options)  # type: ignore[arg-type]


def words(of: Work) -> list[str]:
    return [job.state.word for job in of.jobs]


def test_every_run_is_given_out_once(tmp_path: Path) -> None:
    """Field fault 61."""
    some = work(tmp_path, ("complete", "pending", "stopped"))
    taken = [some.take("a"), some.take("b")]
    assert [job and job.member.name for job in taken] == [member.name for member in SWEEP.members[1:]]
    assert some.take_due("c") is None
    for job in taken:
        assert job
        some.settle(job, ending(0, "complete"))
    assert some.take("a") is None
    assert count_words(some.states())["complete"] == 3


def test_failed_runs_are_taken_again_only_on_demand(tmp_path: Path) -> None:
    """Field fault 63."""
    failed: tuple[Word, ...] = ("failed", "complete", "complete")
    assert work(tmp_path, failed).take("a") is None
    assert work(tmp_path, failed, retry_failed=True).take("a") is not None


def test_a_run_fails_after_so_many_attempts_in_a_row(tmp_path: Path) -> None:
    some = work(tmp_path, ("pending", "complete", "complete"), max_attempts=3)
    for result in (ending(EXIT_STORE), -signal.SIGSEGV, 1):
        job = some.take("a")
        assert job
        some.settle(job, result)
    assert words(some)[0] == "failed"
    assert some.jobs[0].state.note == "the process ended with exit code 1"


def test_attempts_that_get_further_do_not_count(tmp_path: Path) -> None:
    some = work(tmp_path, ("pending", "complete", "complete"), max_attempts=2)
    states = tmp_path / SWEEP.members[0].name / "state"
    states.mkdir(parents=True)
    for step in range(1, 6):
        job = some.take("a")
        assert job
        (states / f"step-{step:012d}.safetensors").write_bytes(b"")
        some.settle(job, -signal.SIGKILL)
        assert (job.state.word, job.state.step, job.attempts) == ("stopped", step, 1)


@pytest.mark.parametrize("code", [EXIT_NON_FINITE, EXIT_SPEC])
def test_the_same_bits_are_not_tried_again(tmp_path: Path, code: int) -> None:
    some = work(tmp_path)
    job = some.take("a")
    assert job
    some.settle(job, ending(code))
    assert (job.state.word, job.state.note) == ("failed", "why")


def test_a_missing_device_is_not_the_runs_fault(tmp_path: Path) -> None:
    some = work(tmp_path, ("pending", "complete", "complete"), max_attempts=1)
    for _ in range(5):
        job = some.take("a")
        assert job
        some.settle(job, ending(EXIT_BACKEND))
    assert words(some)[0] == "stopped"


def test_a_run_that_failed_here_is_left_to_others(tmp_path: Path) -> None:
    """Field fault 62: one bad device does not use up a run's attempts."""
    some = work(tmp_path)
    job = some.take("bad")
    assert job
    some.settle(job, -signal.SIGABRT)
    other = some.take("bad")
    assert other
    assert other is not job
    assert some.take("good") is job


def test_a_run_trained_elsewhere_is_looked_at_again_later(tmp_path: Path) -> None:
    some = work(tmp_path, ("pending", "complete", "complete"))
    job = some.take("a")
    assert job
    some.settle(job, ending(EXIT_OWNED, "running_elsewhere"))
    assert job.not_before > time.monotonic()
    assert (some.take_due("a"), job.attempts, job.is_open) == (None, 0, True)


def test_stopping_ends_whoever_waits_and_fails_nothing(tmp_path: Path) -> None:
    some = work(tmp_path, ("pending", "complete", "complete"), max_attempts=1)
    job = some.take("a")
    assert job
    waiting = threading.Thread(target=some.take, args=("b",))
    waiting.start()
    some.stop()
    waiting.join(10)
    assert not waiting.is_alive()
    some.settle(job, -signal.SIGTERM)
    assert job.state.word == "stopped"


def test_pauses_grow_to_a_minute_and_endings_have_words() -> None:
    assert [pause_after(failures) for failures in (0, 1, 2, 3, 4, 99)] == [0, 0, 1, 2, 4, 60]
    assert describe(-signal.SIGKILL) == "the process was ended by SIGKILL"
    assert describe(ending(75, "interrupted")) == "why"
