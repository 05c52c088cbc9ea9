"""stdout and stderr that nobody reads: nothing raises, nothing blocks, and the exit code is right."""

import subprocess
import sys

import pytest

from icl.output import unbreakable_output
from tests.readers import stderr_that_nobody_reads

TELLS = """
import logging, sys, warnings
from icl.output import unbreakable_output
with unbreakable_output():
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    for number in range(3000):
        print("told", number, file=sys.stderr, flush=True)
        logging.info("logged")
    warnings.warn("warned")
    print("result")
sys.exit(5)
"""


@pytest.mark.parametrize("reader", ["gone", "asleep", "no stderr", "full"])
def test_a_stderr_that_nobody_reads_changes_nothing_else(reader: str) -> None:
    with stderr_that_nobody_reads(reader) as stderr:
        command = [*stderr.shell, sys.executable, "-c", TELLS]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr.fd, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (5, "result\n")


@pytest.mark.parametrize("reader", ["gone", "full"])
def test_a_stdout_that_nobody_reads_leaves_the_exit_code(reader: str) -> None:
    with stderr_that_nobody_reads(reader) as stdout:
        ended = subprocess.run(
            [sys.executable, "-c", TELLS], stdout=stdout.fd, stderr=subprocess.PIPE, text=True, timeout=120
        )
    assert ended.returncode == 5
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("told ") == 3000, "all of it, since somebody reads it"


def test_messages_come_before_the_result_for_those_who_read_both_as_one() -> None:
    command = [sys.executable, "-c", TELLS]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "result"


def test_streams_without_a_descriptor_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a notebook."""
    before = sys.stdout, sys.stderr
    with unbreakable_output():
        assert (sys.stdout, sys.stderr) == before
        print("said")
    assert capsys.readouterr().out == "said\n"


def test_what_was_there_is_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with unbreakable_output():
        within = sys.stdout, sys.stderr
        with unbreakable_output():
            assert (sys.stdout, sys.stderr) == within
        print("said")
        print("told", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capfd.readouterr() == ("said\n", "told\n")
