"""What an attempt is asked for besides its spec, as one value."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import attrs

Progress: TypeAlias = Callable[[str, int, Mapping[str, float]], None]
"""`progress(run, step, row)`: told after every chunk the run's name, the step, and the metrics that are due there."""


def _never() -> bool:
    return False


def _silent(run: str, step: int, row: Mapping[str, float]) -> None:
    return None


@attrs.frozen
class Options:
    """How to train what is asked for now; nothing here is part of a spec.

    Attributes:
        allow_backend_change: go on from a state computed on another backend (the bits will differ from either's).
        should_stop: asked by every run after every chunk; when true its state is saved.
        progress: told of every run.
        trace: a local directory for a recording of the second to the fifth chunk and the effects between them.
    """

    allow_backend_change: bool = False
    should_stop: Callable[[], bool] = _never
    progress: Progress = _silent
    trace: str | None = None
