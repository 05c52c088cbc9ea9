"""Saving beside training: order, bounds, retries, and failures that are not lost."""

import random
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


def test_jobs_that_need_not_be_alone_run_at_once_and_others_in_between() -> None:
    done: list[str] = []
    together = [threading.Barrier(3, timeout=60) for _ in range(2)]

    def meet(index: int) -> None:
        together[index].wait()  # nobody passes unless all three have begun
        done.append(f"round {index}")

    with Writer(persist=False, num_threads=3) as writer:
        for index in range(2):
            for _ in range(3):
                writer.submit(lambda index=index: meet(index), alone=False)  # type: ignore[misc]
            writer.submit(lambda index=index: done.append(f"after {index}"))  # type: ignore[misc]
    assert done == ["round 0"] * 3 + ["after 0"] + ["round 1"] * 3 + ["after 1"]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_chance_orders_keep_the_law(num_threads: int) -> None:
    chance = random.Random(num_threads)
    running: set[int] = set()
    seen: list[tuple[int, set[int]]] = []
    alone = [chance.random() < 0.3 for _ in range(200)]

    def job(number: int) -> None:
        running.add(number)
        seen.append((number, set(running)))
        running.discard(number)

    with Writer(persist=False, num_threads=num_threads) as writer:
        for number in range(200):
            writer.submit(lambda number=number: job(number), alone=alone[number])  # type: ignore[misc]
    order = [number for number, _ in seen]
    assert sorted(order) == list(range(200))
    for place, (number, others) in enumerate(seen):
        if alone[number]:
            assert others == {number}
            assert set(order[:place]) == set(range(number))


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
