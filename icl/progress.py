"""How a run is shown while it trains: one bar, on a terminal, in a notebook or in a log."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import attrs

Progress: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""`progress(step, row)`: the run is at `step`, with the metrics that are due there, which may be none."""

_SHOWN = {"train/loss": "loss", "pretrain/mse": "mse", "true/mse": "true mse"}
_LOG_SECONDS = 30.0
_importing = threading.Lock()


@contextmanager
def progress_bar(total_steps: int, *, leave: bool) -> Iterator[Progress]:
    """A bar over `total_steps` updates on stderr or in the notebook, with the newest loss and mean squared errors.

    Where stderr is a file it is written every half minute.

    Args:
        leave: whether the bar stays when it ends.
    """
    interval = 0.1 if sys.stderr.isatty() or "ipykernel" in sys.modules else _LOG_SECONDS
    bar = _bar_class()(
        total=total_steps, unit="step", leave=leave, mininterval=interval, maxinterval=max(10.0, interval)
    )
    newest: dict[str, float] = {}
    started = False

    def progress(step: int, row: Mapping[str, float]) -> None:
        nonlocal started
        if not started:  # what an earlier attempt did counts for no speed
            bar.initial = bar.n = bar.last_print_n = step
            started = True
        newest.update(row)
        bar.set_postfix({word: f"{newest[name]:.4g}" for name, word in _SHOWN.items() if name in newest}, refresh=False)
        bar.update(step - bar.n)

    with bar:
        yield progress


@attrs.define
class Deferred:
    """A progress that raises nothing: what `progress` raises is kept, and it is not called again.

    Only a KeyboardInterrupt is let through when there was one before, as `interrupted` says: it means now.
    """

    progress: Progress
    interrupted: Callable[[], bool]
    error: BaseException | None = None

    def __call__(self, step: int, row: Mapping[str, float]) -> None:
        if self.error is not None:
            return
        try:
            self.progress(step, row)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self.interrupted():
                raise
            self.error = error


@cache
def _bar_class() -> Any:
    """tqdm's class for this place; without ipywidgets a notebook gets the text bar, and no advice to install them."""
    with _importing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm
    return tqdm
