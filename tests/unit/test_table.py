"""A sweep as lines of text, on a terminal and elsewhere."""

import io
import os
import re
from typing import Any

import pytest

from icl.engines.table import Table, describe_states, describe_status
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
    assert "1 run: 1 running" in first
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
    assert stream.getvalue() == "1 run: 1 running\ncpu:0: L2H4-M1\n2 runs: 1 complete, 1 running\n"


PACE = {"steps_per_second": 1234.5, "seconds_left": 7500.0}


def test_a_terminal_shows_how_fast_it_goes_and_how_long_it_takes() -> None:
    told = status(100)
    told["workers"][0]["steps_per_second"] = 456.7
    lines = describe_status({**told, "pace": PACE})
    assert lines[0] == "1 run: 1 running; 1,234 steps/s, about 2 h 05 min left"
    assert lines[1] == "  cpu:0    #####                 25%       100      457/s  L2H4-M1"
    unknown = {"steps_per_second": None, "seconds_left": None}
    assert describe_status({**told, "pace": unknown})[0] == "1 run: 1 running"


def test_a_file_gets_the_pace_with_other_news_only() -> None:
    stream = io.StringIO()
    table = Table(stream)
    for step in (100, 200, 300):
        table.show({**status(step), "pace": PACE | {"steps_per_second": float(step)}})
    assert stream.getvalue() == "1 run: 1 running\ncpu:0: L2H4-M1\n100 steps/s, about 2 h 05 min left\n"


def test_lines_are_no_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapped one would count as two when it is rewritten."""
    stream = Terminal()
    monkeypatch.setattr(stream, "fileno", lambda: 0)
    monkeypatch.setattr("os.get_terminal_size", lambda fd: os.terminal_size((30, 9)))
    Table(stream).show(status(100))
    shown = re.sub(r"\x1b\[\d*[A-Z]", "", stream.getvalue()).splitlines()
    assert max(map(len, shown)) == 30


def test_states_are_one_line_a_run() -> None:
    states = [RunState("a", "failed", 5, 10, "why"), RunState("long", "complete", 10, 10)]
    assert describe_states(states, ["seed=1", "seed=2"]) == [
        "a     failed               5/10  seed=1  why",
        "long  complete            10/10  seed=2",
    ]
