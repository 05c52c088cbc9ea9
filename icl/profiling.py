"""What each phase of a run costs: wall time, the main thread's processor time, and the device's own counters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter, thread_time

Profile = dict[str, dict[str, float]]
"""By phase ("train", "evaluate", "save"), what was counted in it; names end in their unit when they are not counts."""


class Profiler:
    """Adds up, for each phase, what its visits cost; all phases together are all that happened until the last ended."""

    def __init__(self, counters: Callable[[], Mapping[str, float]]) -> None:
        self._counters = counters
        self._last = self._read()
        self.profile: Profile = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count towards a phase what runs inside, and what the device finished and the loop did since the last one."""
        try:
            yield
        finally:
            now, total = self._read(), self.profile.setdefault(name, {"visits": 0.0})
            total["visits"] += 1
            for key, value in now.items():
                total[key] = total.get(key, 0.0) + value - self._last.get(key, 0.0)
            self._last = now

    def _read(self) -> dict[str, float]:
        return {"wall_seconds": perf_counter(), "main_thread_seconds": thread_time(), **self._counters()}


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
