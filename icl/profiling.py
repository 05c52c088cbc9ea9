"""What each phase of a run costs: wall time, the main thread's processor time, and the device's own counters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, thread_time

Profile = dict[str, dict[str, float]]
"""By phase ("train", "evaluate", "save"), what was counted in it; names end in their unit when they are not counts."""


class Laps:
    """What this thread and the device did since they were last asked about, whoever asked."""

    def __init__(self, counters: Callable[[], Mapping[str, float]]) -> None:
        self._counters = counters
        self._last = self._read()

    def lap(self) -> dict[str, float]:
        """What was counted since the last lap."""
        before, self._last = self._last, self._read()
        return {key: value - before.get(key, 0.0) for key, value in self._last.items()}

    def _read(self) -> dict[str, float]:
        return {"wall_seconds": perf_counter(), "main_thread_seconds": thread_time(), **self._counters()}


class Profiler:
    """Adds up, for each phase of a run, what its visits cost.

    All phases of all runs that share `laps` are together all that happened until the last ended.
    """

    def __init__(self, laps: Laps) -> None:
        self._laps = laps
        self._laps.lap()  # what came before belongs to no phase
        self.profile: Profile = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count towards a phase what runs inside, and what the device finished and the loop did since the last one."""
        try:
            yield
        finally:
            counted, total = self._laps.lap(), self.profile.setdefault(name, {"visits": 0.0})
            total["visits"] += 1
            for key, value in counted.items():
                total[key] = total.get(key, 0.0) + value


def format_profile(profile: Profile) -> str:
    """A table: a row for each thing counted, a column for each phase."""
    phases = list(profile)
    names = list(dict.fromkeys(name for counted in profile.values() for name in counted))
    rows = [["", *phases]]
    for name in names:
        values = (profile[phase].get(name, 0.0) for phase in phases)
        rows.append([name, *(f"{value:.3f}" if name.endswith("seconds") else f"{value:.0f}" for value in values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(line) for line in lines)
