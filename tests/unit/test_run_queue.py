"""Which run is next, and what becomes of one that an attempt has ended."""

import signal
import threading
import time
from pathlib import Path

import pytest

from icl.attempt import Ending, ending_of_process
from icl.core.status import AttemptStatus, RunStatus
from icl.engines.retries import RetryPolicy, counts_against_device
from icl.engines.run_queue import RunQueue, count_statuses
from icl.exit_codes import ExitCode
from icl.io.states import RunState
from icl.io.store import open_store
from icl.io.sweepfile import expand_sweep

SWEEP = expand_sweep(
    {
        "base": {"task": {"task_dim": 2, "num_examples": 2}, "training": {"total_steps": 6}},
        "grid": {"seeds.init": [0, 1, 2]},
    }
)


def ending(code: int, status: AttemptStatus = "failed") -> Ending:
    return Ending(code, "run", "store", None, status, error=None if code == 0 else "why")


def died(code: int) -> Ending:
    return ending_of_process(code, "run", "store")


def queue(
    tmp_path: Path,
    standing: tuple[RunStatus, ...] = ("pending",) * 3,
    *,
    retry_failed: bool = False,
    max_attempts: int = 5,
) -> RunQueue:
    states = [RunState(m.name, status, 0, 6) for m, status in zip(SWEEP.members, standing, strict=True)]
    retries = RetryPolicy(max_attempts, longest_pause=0.0)
    return RunQueue(open_store(str(tmp_path)), SWEEP.members, states, retries=retries, retry_failed=retry_failed)


def statuses(of: RunQueue) -> list[str]:
    return [run.state.status for run in of.runs]


def test_every_run_is_given_out_once(tmp_path: Path) -> None:
    """Field fault 61."""
    some = queue(tmp_path, ("complete", "pending", "stopped"))
    taken = [some.take("a"), some.take("b")]
    assert [run and run.member.name for run in taken] == [member.name for member in SWEEP.members[1:]]
    assert some.take_due("c") is None
    for run in taken:
        assert run
        some.record_ending(run, ending(0, "complete"))
    assert some.take("a") is None
    assert count_statuses(some.states())["complete"] == 3


def test_failed_runs_are_taken_again_only_on_demand(tmp_path: Path) -> None:
    """Field fault 63."""
    failed: tuple[RunStatus, ...] = ("failed", "complete", "complete")
    assert queue(tmp_path, failed).take("a") is None
    assert queue(tmp_path, failed, retry_failed=True).take("a") is not None


def test_a_run_fails_after_so_many_attempts_in_a_row(tmp_path: Path) -> None:
    some = queue(tmp_path, ("pending", "complete", "complete"), max_attempts=3)
    for result in (ending(ExitCode.STORE), died(-signal.SIGSEGV), died(1)):
        run = some.take("a")
        assert run
        some.record_ending(run, result)
    assert statuses(some)[0] == "failed"
    assert some.runs[0].state.note == "the process ended with exit code 1"


def test_attempts_that_get_further_do_not_count(tmp_path: Path) -> None:
    some = queue(tmp_path, ("pending", "complete", "complete"), max_attempts=2)
    states = tmp_path / SWEEP.members[0].name / "state"
    states.mkdir(parents=True)
    for step in range(1, 6):
        run = some.take("a")
        assert run
        (states / f"step-{step:012d}.safetensors").write_bytes(b"")
        some.record_ending(run, died(-signal.SIGKILL))
        assert (run.state.status, run.state.step, run.attempts) == ("stopped", step, 1)


@pytest.mark.parametrize("code", [ExitCode.NON_FINITE, ExitCode.SPEC])
def test_what_would_come_again_is_not_tried_again(tmp_path: Path, code: ExitCode) -> None:
    some = queue(tmp_path)
    run = some.take("a")
    assert run
    some.record_ending(run, ending(code))
    assert (run.state.status, run.state.note) == ("failed", "why")


def test_a_missing_device_is_not_the_runs_fault(tmp_path: Path) -> None:
    some = queue(tmp_path, ("pending", "complete", "complete"), max_attempts=1)
    for _ in range(5):
        run = some.take("a")
        assert run
        some.record_ending(run, ending(ExitCode.UNAVAILABLE))
    assert statuses(some)[0] == "stopped"


def test_a_run_that_failed_here_is_left_to_others(tmp_path: Path) -> None:
    """Field fault 62: one bad device does not use up a run's attempts."""
    some = queue(tmp_path)
    run = some.take("bad")
    assert run
    some.record_ending(run, died(-signal.SIGABRT))
    other = some.take("bad")
    assert other
    assert other is not run
    assert some.take("good") is run


def test_a_run_trained_elsewhere_is_looked_at_again_later(tmp_path: Path) -> None:
    some = queue(tmp_path, ("pending", "complete", "complete"))
    run = some.take("a")
    assert run
    some.record_ending(run, ending(ExitCode.OWNED, "running_elsewhere"))
    assert run.not_before > time.monotonic()
    assert (some.take_due("a"), run.attempts, run.is_open) == (None, 0, True)


def test_stopping_ends_whoever_waits_and_fails_nothing(tmp_path: Path) -> None:
    some = queue(tmp_path, ("pending", "complete", "complete"), max_attempts=1)
    run = some.take("a")
    assert run
    waiting = threading.Thread(target=some.take, args=("b",))
    waiting.start()
    some.stop()
    waiting.join(10)
    assert not waiting.is_alive()
    some.record_ending(run, died(-signal.SIGTERM))
    assert run.state.status == "stopped"


def test_pauses_grow_to_a_minute_and_endings_have_words() -> None:
    assert [RetryPolicy().pause_after(failures) for failures in (0, 1, 2, 3, 4, 99)] == [0, 0, 1, 2, 4, 60]
    assert died(-signal.SIGKILL).reason == "the process was ended by SIGKILL"
    assert ending(75, "interrupted").reason == "why"


def test_a_process_that_says_nothing_has_an_ending_that_says_nothing_of_the_run(tmp_path: Path) -> None:
    """Also one with an exit code that a run would have: it may have died before the run was read."""
    for code in (0, 1, 3, 5, 6, 143):
        assert (died(code).status, died(code).code) == ("failed", 1)
        assert died(code).reason == f"the process ended with exit code {code}"
    assert died(75).status == "interrupted"
    some = queue(tmp_path)
    run = some.take("a")
    assert run
    some.record_ending(run, died(0))
    assert (run.state.status, run.attempts) == ("stopped", 1)


def test_what_may_be_the_devices_fault() -> None:
    """A kill, a request to stop or a bad spec is not; a crash, a missing chip or a full disk may be."""
    blameless = [ending(code) for code in (2, 5)] + [ending(6, "running_elsewhere"), ending(75, "interrupted")]
    blameless += [died(code) for code in (75, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)]
    assert not any(map(counts_against_device, blameless))
    assert all(map(counts_against_device, [ending(3), ending(4), *map(died, (0, 1, 143, -signal.SIGSEGV))]))
