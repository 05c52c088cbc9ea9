"""Saving beside training: order, bounds, retries, and failures that are not lost."""

import threading
from collections.abc import Callable

import pytest

from icl.io import writer as writer_module
from icl.io.errors import StoreConflictError, StoreError, TransientStoreError
from icl.io.writer import Writer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(writer_module, "_LONGEST_PAUSE", 0.002)


def failing(times: int, done: list[str], error: type[Exception] = TransientStoreError) -> Callable[[], None]:
    """A job that fails so many times before it succeeds."""
    left = [times]

    def job() -> None:
        if left[0]:
            left[0] -= 1
            raise error("by order")
        done.append("late")

    return job


def test_jobs_end_in_their_order_before_the_end() -> None:
    done: list[int] = []
    with Writer(persist=False) as writer:
        for number in range(100):
            writer.submit(lambda number=number: done.append(number))  # type: ignore[misc]
        writer.drain()
        assert done == list(range(100))
        writer.submit(lambda: done.append(100))
    assert done[-1] == 100


def test_whoever_gives_too_much_waits() -> None:
    gate, given = threading.Event(), threading.Event()

    def wait() -> None:
        gate.wait()

    with Writer(persist=False, capacity=10) as writer:
        writer.submit(wait, 6)
        writer.submit(lambda: None, 4)

        def give() -> None:
            writer.submit(lambda: None, 1)
            given.set()

        thread = threading.Thread(target=give)
        thread.start()
        assert not given.wait(0.05)
        gate.set()
        thread.join()
        assert given.is_set()


def test_one_job_larger_than_everything_is_taken() -> None:
    done: list[int] = []
    with Writer(persist=False, capacity=10) as writer:
        writer.submit(lambda: done.append(1), 1000)
    assert done == [1]


def test_a_failure_ends_the_jobs_and_is_raised_where_one_can_act() -> None:
    done: list[str] = []
    with pytest.raises(StoreError, match="by order"), Writer(persist=False) as writer:  # noqa: PT012
        writer.submit(failing(1, done))
        writer.submit(lambda: done.append("after"))
        with pytest.raises(StoreError, match="by order"):
            writer.drain()
        with pytest.raises(StoreError, match="by order"):
            writer.submit(lambda: done.append("never"))
    assert done == []


def test_persistence_tries_again_until_it_succeeds() -> None:
    done: list[str] = []
    with Writer(persist=True) as writer:
        writer.submit(failing(5, done))
        writer.submit(lambda: done.append("after"))
    assert done == ["late", "after"]


@pytest.mark.parametrize("error", [StoreError, StoreConflictError, ValueError])
def test_persistence_does_not_repeat_what_stays_wrong(error: type[Exception]) -> None:
    with pytest.raises(error, match="by order"), Writer(persist=True) as writer:
        writer.submit(failing(1, [], error))


def test_another_error_waits_for_the_jobs_but_not_for_a_dead_store() -> None:
    done: list[str] = []
    with pytest.raises(ZeroDivisionError), Writer(persist=True) as writer:  # noqa: PT012
        writer.submit(lambda: done.append("first"))
        writer.submit(failing(10**9, done))
        raise ZeroDivisionError
    assert done == ["first"]
