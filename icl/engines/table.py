"""A sweep as lines of text: rewritten in place on a terminal, and only where something has changed elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from icl.io.states import RunState


class Table:
    """Shows status after status on a stream."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._shown = stream, 0
        self._before: set[str] = set()

    def show(self, status: Mapping[str, Any]) -> None:
        """Show a status as `describe_status` puts it; without a terminal, only what runs and counts that are new."""
        if self._stream.isatty():
            lines = describe_status(status)
            up = f"\x1b[{self._shown}F" if self._shown else ""
            self._stream.write(up + "".join(f"\x1b[2K{line}\n" for line in lines) + "\x1b[0J")
            self._shown = len(lines)
        else:
            lines = [
                _counts(status),
                *(f"{worker['device']}: {worker['run']}" for worker in status["workers"] if worker["run"]),
            ]
            self._stream.writelines(f"{line}\n" for line in lines if line not in self._before)
            self._before = set(lines)
        self._stream.flush()


def describe_status(status: Mapping[str, Any]) -> list[str]:
    """The counts, and a line for each worker."""
    lines = [_counts(status)]
    for worker in status["workers"]:
        doing = worker["note"] or "idle"
        if worker["run"]:
            part = worker["step"] / worker["total_steps"]
            doing = f"{'#' * round(20 * part):20} {part:4.0%}  {worker['step']:>8}  {worker['run']}"
        lines.append(f"  {worker['device']:8} {doing}")
    return lines


def describe_states(states: Sequence[RunState], labels: Iterable[str]) -> list[str]:
    """One line a run: its name, state, step, what sets it apart, and where it runs or why it failed."""
    width = max(len(state.name) for state in states)
    rows = []
    for state, label in zip(states, labels, strict=True):
        step = f"{state.step}/{state.total_steps}"
        rows.append(f"{state.name:{width}}  {state.word:8}  {step:>15}  {label}  {state.note}".rstrip())
    return rows


def _counts(status: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {word}" for word, count in status["counts"].items() if count)
    return f"{sum(status['counts'].values())} runs: {counts}"
