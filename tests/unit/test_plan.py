"""Cadences and chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icl.core.plan import build_plan, plan_chunks, spaced_steps
from icl.core.rules import MAX_INT
from icl.core.spec import StepsSpec
from icl.testing import tiny_spec, with_training


def test_both_ends_are_always_there() -> None:
    for total in (1, 2, 3, 500_000):
        for steps in (StepsSpec(), StepsSpec(log=1), StepsSpec(linear=1), StepsSpec(log=50, linear=50)):
            chosen = spaced_steps(steps, total)
            assert chosen[0] == 0
            assert chosen[-1] == total
            assert list(chosen) == sorted(set(chosen))


@given(st.integers(1, 60), st.integers(0, 2000), st.integers(0, 2000))
def test_more_points_than_steps_are_rounded_like_the_others(total: int, log: int, linear: int) -> None:
    geometric = {round(total ** (i / max(log - 1, 1))) for i in range(log)}
    even = {round(total * i / max(linear - 1, 1)) for i in range(linear)}
    assert spaced_steps(StepsSpec(log=log, linear=linear), total) == tuple(sorted({0, total, *geometric, *even}))


def test_a_cadence_of_two_thousand_million_points_is_every_step() -> None:
    """In work that is a matter of the run's steps."""
    for steps in (StepsSpec(log=MAX_INT), StepsSpec(linear=MAX_INT)):
        assert spaced_steps(steps, 1000) == tuple(range(1001))


def test_hoogland_cadence_has_190_distinct_steps() -> None:
    """Hoogland et al. 2024; earlier trainers, fault 12: 100 + 100 are asked for, and the number is stated."""
    assert len(spaced_steps(StepsSpec(log=100, linear=100), 500_000)) == 190


def test_listed_steps_are_added() -> None:
    assert spaced_steps(StepsSpec(also=(7, 3)), 10) == (0, 3, 7, 10)


@given(st.integers(0, 50), st.sets(st.integers(0, 3000), min_size=1), st.integers(1, 4096))
def test_chunks_hit_every_stop(start: int, stops: set[int], max_chunk: int) -> None:
    lengths = list(plan_chunks(start, stops, max_chunk))
    reached, at = [], start
    for length in lengths:
        assert 1 <= length <= max_chunk
        at += length
        reached.append(at)
    assert {stop for stop in stops if stop > start} <= set(reached)
    assert at == max(start, *stops)


@pytest.mark.parametrize("total", [1, 2, 3])
def test_tiny_runs_have_plans(total: int) -> None:
    plan = build_plan(with_training(tiny_spec(), total_steps=total))
    assert plan.stops()[0] == 0
    assert plan.stops()[-1] == total
    assert plan.save_state[-1] == total
