"""Phases add up to everything that was counted."""

from itertools import count

import pytest

from icl.profiling import Laps, Profiler, format_profile


def test_phases_add_up_to_the_whole() -> None:
    ticks = count()
    profiler = Profiler(Laps(lambda: {"ticks": float(next(ticks))}))
    for name in ("train", "save", "train"):
        with profiler.phase(name):
            next(ticks)
    assert profiler.profile["train"]["visits"] == 2
    assert sum(phase["ticks"] for phase in profiler.profile.values()) == 6
    assert all(phase["wall_seconds"] >= 0 for phase in profiler.profile.values())


def test_a_phase_that_fails_is_counted() -> None:
    profiler = Profiler(Laps(dict))
    with pytest.raises(ValueError, match="broken"), profiler.phase("train"):
        raise ValueError("broken")
    assert profiler.profile["train"]["visits"] == 1


def test_the_table_has_a_column_a_phase() -> None:
    lines = format_profile({"train": {"visits": 2.0, "wall_seconds": 1.5}, "save": {"visits": 1.0}}).splitlines()
    assert lines[0].split() == ["train", "save"]
    assert lines[1].split() == ["visits", "2", "1"]
    assert lines[2].split() == ["wall_seconds", "1.500", "0.000"]
