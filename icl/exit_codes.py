"""The exit codes of every command. The help texts and the README's table come from here."""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended; `meaning` says it in words."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> "ExitCode":
        """A code that carries its meaning."""
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    COMPLETE = 0, "complete, also when it already was"
    INCOMPLETE = 1, "some runs of a sweep are not complete, or a fleet did not start"
    SPEC = 2, "bad spec or usage, or more than this machine holds: every fault at once, each with what to do"
    UNAVAILABLE = 3, "no such backend, device or engine here: no package, no chip, chip in use (never another instead)"
    STORE = 4, "store or checkpoint fault"
    NON_FINITE = 5, "non-finite loss; what was saved before is intact"
    OWNED = 6, "another process is training this run: nothing to do"
    INTERRUPTED = 75, "stopped by SIGTERM or SIGINT, saved if a chunk ended in time: run again to go on"


def describe_exit_codes(*codes: ExitCode) -> str:
    """What the help of a command says of the codes that it ends with, a line each."""
    return "\n".join(["exit codes:", *(f"  {int(code):<2}  {code.meaning}" for code in codes)])
