"""Whether a run has become slow: judged by how long its own steps took, so that no machine need be known."""

import math

_TIMES = 5  # as long as the fastest
_READINGS, _SECONDS = 3, 30.0  # in a row, and together: a pause of the machine is no reason to warn


class Slowdown:
    """How long the steps of a run take, reading by reading."""

    def __init__(self) -> None:
        self._fastest = math.inf  # seconds a step
        self._slow: list[tuple[int, float]] = []
        self._told = False

    def add(self, num_steps: int, seconds: float) -> tuple[float, float] | None:
        """Seconds a step now and at its fastest, once, when steps have been many times slower for a while; else None.

        Args:
            num_steps, seconds: since the last reading.
        """
        self._fastest = min(self._fastest, seconds / num_steps)
        slow = seconds / num_steps >= _TIMES * self._fastest
        self._slow = [*self._slow, (num_steps, seconds)] if slow and not self._told else []
        total = sum(taken for _, taken in self._slow)
        if len(self._slow) < _READINGS or total < _SECONDS:
            return None
        self._told = True
        return total / sum(steps for steps, _ in self._slow), self._fastest
