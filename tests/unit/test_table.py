"""A sweep as lines of text, on a terminal and elsewhere."""

import io
from typing import Any

from icl.engines.table import Table, describe_states
from icl.io.states import RunState

IDLE = {"device": "cpu:1", "pid": None, "run": None, "step": 0, "total_steps": None, "note": ""}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status(step: int, complete: int = 0) -> dict[str, Any]:
    busy = {"device": "cpu:0", "pid": 7, "run": "L2H4-M1", "step": step, "total_steps": 400, "note": ""}
    return {"counts": {"complete": complete, "running": 1, "failed": 0}, "workers": [busy, IDLE]}


def test_a_terminal_is_rewritten_in_place() -> None:
    stream = Terminal()
    table = Table(stream)
    table.show(status(100))
    first = stream.getvalue()
    assert "1 runs: 1 running" in first
    assert "#####                 25%       100  L2H4-M1" in first
    assert "cpu:1    idle" in first
    table.show(status(200))
    again = stream.getvalue()[len(first) :]
    assert again.startswith("\x1b[3F"), "up over the three lines"
    assert " 50%       200  L2H4-M1" in again


def test_a_file_gets_only_what_is_new() -> None:
    stream = io.StringIO()
    table = Table(stream)
    for step in (100, 200, 300):
        table.show(status(step))
    table.show(status(400, complete=1))
    assert stream.getvalue() == "1 runs: 1 running\ncpu:0: L2H4-M1\n2 runs: 1 complete, 1 running\n"


def test_states_are_one_line_a_run() -> None:
    states = [RunState("a", "failed", 5, 10, "why"), RunState("long", "complete", 10, 10)]
    assert describe_states(states, ["seed=1", "seed=2"]) == [
        "a     failed               5/10  seed=1  why",
        "long  complete            10/10  seed=2",
    ]
