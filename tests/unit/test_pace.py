"""Steps a second and the time left."""

import pytest

from icl.engines.pace import Ticks, describe_pace, rate_in_words, steps_per_second, time_in_words, with_tick


def ticks(*done: tuple[float, int]) -> Ticks:
    found: Ticks = ()
    for now, steps in done:
        found = with_tick(found, now, steps)
    return found


def test_the_rate_is_that_of_the_recent_ticks() -> None:
    slow_then_fast = [(float(t), 10 * t) for t in range(100)] + [(100.0 + t, 1000 + 50 * t) for t in range(200)]
    assert steps_per_second(ticks(*slow_then_fast), 299.0) == pytest.approx(50)
    assert len(ticks(*slow_then_fast)) < 70, "what does not count is forgotten"


def test_nothing_done_is_no_tick_and_what_stands_still_has_no_rate() -> None:
    found = ticks((0.0, 0), (1.0, 5), (2.0, 5), (3.0, 5), (4.0, 20))
    assert found == ((0.0, 0), (1.0, 5), (4.0, 20))
    assert steps_per_second(found, 5.0) == 5.0
    assert steps_per_second(found, 64.0) == 5.0
    assert steps_per_second(found, 65.0) is None
    assert steps_per_second(ticks((0.0, 3)), 1.0) is None


def test_one_tick_in_longer_than_recent_is_enough() -> None:
    """A large model is told of every hundred steps, which may take minutes."""
    assert steps_per_second(ticks((0.0, 0), (200.0, 100), (400.0, 200)), 590.0) == 0.5


def test_the_time_left_is_that_of_the_steps_left() -> None:
    assert describe_pace(600, 5.0) == {"steps_per_second": 5.0, "seconds_left": 120.0}
    assert describe_pace(600, None) == {"steps_per_second": None, "seconds_left": None}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (3600, "1 h 00 min"), (7500, "2 h 05 min"), (187200, "2 d 04 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert time_in_words(seconds) == words


def test_rates() -> None:
    assert [rate_in_words(rate) for rate in (0.123, 9.87, 12.3, 12345)] == ["0.12", "9.9", "12", "12,345"]
