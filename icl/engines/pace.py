"""How fast training goes and how long it will take, from moments at which so many steps were done. Pure."""

from typing import Any, TypeAlias

import attrs

Ticks: TypeAlias = tuple[tuple[float, int], ...]
"""Moments in seconds, ascending, and how many steps were done at each, never fewer than before."""

RECENT_SECONDS = 60.0
SAVED_SECONDS = 600.0  # states are saved every now and then


def with_tick(ticks: Ticks, now: float, steps: int, recent_seconds: float = RECENT_SECONDS) -> Ticks:
    """The ticks that still count and one more; the same when nothing was done since the last."""
    if ticks and ticks[-1][1] >= steps:
        return ticks
    return (*_counting(ticks, now, recent_seconds), (now, steps))


def steps_per_second(ticks: Ticks, now: float, recent_seconds: float = RECENT_SECONDS) -> float | None:
    """Steps a second from the first to the last of the recent ticks; None where that is not known, or nothing moves."""
    counting = _counting(ticks, now, recent_seconds)
    if len(counting) < 2 or counting[-1][0] <= counting[0][0]:
        return None
    (first, before), (last, after) = counting[0], counting[-1]
    stands_still = now - last > max(recent_seconds, 2 * (last - first))
    return None if stands_still else (after - before) / (last - first)


def describe_pace(steps_left: int, rate: float | None) -> dict[str, Any]:
    """What a status says of all workers together: steps a second, and the seconds that the steps left take."""
    return {"steps_per_second": rate, "seconds_left": steps_left / rate if rate else None}


@attrs.define
class SavedPace:
    """How fast runs go whose workers do not say so, from what is saved of them."""

    _ticks: Ticks = ()

    def describe(self, now: float, steps: int, left: int) -> dict[str, Any]:
        """The pace, at a moment when so many steps are saved and so many are left."""
        self._ticks = with_tick(self._ticks, now, steps, SAVED_SECONDS)
        return describe_pace(left, steps_per_second(self._ticks, now, SAVED_SECONDS))


def rate_in_words(rate: float) -> str:
    """A rate with as many digits as a reader wants."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def time_in_words(seconds: float) -> str:
    """A duration in its two largest units, since it is an estimate."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{round(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // (24 * 60)} d {minutes % (24 * 60) // 60:02} h"


def _counting(ticks: Ticks, now: float, recent_seconds: float) -> Ticks:
    """The recent ticks, at least the last, and the one before them, from which the first of them was reached."""
    num_recent = max(1, sum(tick[0] >= now - recent_seconds for tick in ticks))
    return ticks[-num_recent - 1 :]
