"""A sweep as lines of text: rewritten in place on a terminal, and only where something has changed elsewhere."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from icl.core.words import counted
from icl.engines.pace import rate_in_words, time_in_words
from icl.io.states import RunState


class Table:
    """Shows status after status on a stream."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._shown = stream, 0
        self._before: set[str] = set()

    def show(self, status: Mapping[str, Any]) -> None:
        """Show a status as `describe_status` puts it; without a terminal, only what runs and counts that are new."""
        if self._stream.isatty():
            columns = _columns(self._stream)
            lines = [line[:columns] for line in describe_status(status)]  # one that is wrapped would count as two
            up = f"\x1b[{self._shown}F" if self._shown else ""
            self._stream.write(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[0J")
            self._shown = len(lines)
        else:
            lines = [
                _counts(status),
                *(f"{worker['device']}: {worker['run']}" for worker in status["workers"] if worker["run"]),
            ]
            new = [line for line in lines if line not in self._before]
            self._stream.writelines(f"{line}\n" for line in [*new, *(_pace(status) if new else [])])
            self._before = set(lines)
        self._stream.flush()


def describe_status(status: Mapping[str, Any]) -> list[str]:
    """The counts with the pace, and a line for each worker with its own."""
    lines = ["; ".join([_counts(status), *_pace(status)])]
    for worker in status["workers"]:
        doing = worker["note"] or "idle"
        if worker["run"]:
            part = worker["step"] / worker["total_steps"]
            rate = worker.get("steps_per_second")
            speed = f"{rate_in_words(rate):>7}/s  " if rate else ""
            doing = f"{'#' * round(20 * part):20} {part:4.0%}  {worker['step']:>8}  {speed}{worker['run']}"
        lines.append(f"  {worker['device']:8} {doing}")
    return lines


def describe_states(states: Sequence[RunState], labels: Iterable[str]) -> list[str]:
    """One line a run: its name, state, step, what sets it apart, and where it runs or why it failed."""
    width = max((len(state.name) for state in states), default=0)
    rows = []
    for state, label in zip(states, labels, strict=True):
        step = f"{state.step}/{state.total_steps}"
        rows.append(f"{state.name:{width}}  {state.status:8}  {step:>15}  {label}  {state.note}".rstrip())
    return rows


def _counts(status: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in status["counts"].items() if count)
    return f"{counted(sum(status['counts'].values()), 'run')}: {counts}"


def _pace(status: Mapping[str, Any]) -> list[str]:
    """Steps a second and the time left in words, where they are known."""
    pace = status.get("pace") or {}
    if not pace.get("steps_per_second"):
        return []
    return [f"{rate_in_words(pace['steps_per_second'])} steps/s, about {time_in_words(pace['seconds_left'])} left"]


def _columns(stream: IO[str]) -> int | None:
    """How long a line may be on a terminal; None where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None
