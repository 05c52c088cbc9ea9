"""How a number of things is said, and that nobody says "1 runs"."""

import re
from pathlib import Path

import pytest

from icl.core.words import counted

ROOT = Path(__file__).parents[2] / "icl"
NOUNS = "attempts|checkpoints|evaluations|faults|objects|runs|VMs"


@pytest.mark.parametrize(("count", "said"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (1200, "1,200 runs")])
def test_a_number_and_what_it_counts(count: int, said: str) -> None:
    assert counted(count, "run") == said


# Told only where there are at least two.
ALWAYS_MANY = {"{len(found)} runs", "{count} runs", "{MAX_RUNS} runs"}


def test_messages_count_with_it() -> None:
    pattern = re.compile(rf"\{{[^{{}}]*\}} (?:{NOUNS})\b(?! here)")  # "process 7 runs here"
    said = {match[0] for path in ROOT.rglob("*.py") for match in pattern.finditer(path.read_text())}
    assert said <= ALWAYS_MANY
