"""When steps count as slow."""

import pytest

from icl.core.slowdown import Slowdown


def warnings(*readings: tuple[int, float]) -> list[tuple[float, float]]:
    slowdown = Slowdown()
    return [slow for steps, seconds in readings if (slow := slowdown.add(steps, seconds))]


def test_many_times_slower_for_a_while_is_said_once() -> None:
    fast, slow = (100, 2.0), (100, 50.0)
    assert warnings(fast, fast, slow, slow, slow, slow, fast, slow, slow, slow) == [(0.5, 0.02)]


@pytest.mark.parametrize(
    "readings",
    [
        [(100, 2.0)] * 50,
        [(100, 50.0)] * 50,  # slow from the start: nothing to compare with
        [(100, 50.0), *[(100, 2.0)] * 50],  # the first compiles
        [(100, 2.0), (100, 900.0), (100, 2.0), (100, 900.0), (100, 900.0)],  # pauses
        [(100, 2.0), *[(100, 9.9)] * 50],  # not many times
        [(1, 0.001), *[(1, 0.05)] * 500],  # not for long
    ],
    ids=["steady", "always-slow", "compiles", "pauses", "a-little", "short"],
)
def test_nothing_else_is(readings: list[tuple[int, float]]) -> None:
    assert warnings(*readings) == []


def test_readings_of_any_length_count_by_their_steps() -> None:
    assert warnings((10, 0.1), (1, 10.0), (2, 20.0), (7, 70.0)) == [(10.0, 0.01)]
