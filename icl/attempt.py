"""One attempt at a run, and how it ended: an exit code, a JSON line, and never a traceback for a user's mistake."""

import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from icl.core.errors import BackendUnavailableError, NonFiniteLossError, SpecError
from icl.core.spec import Spec
from icl.core.status import AttemptStatus
from icl.exit_codes import ExitCode
from icl.io.errors import CheckpointError, RunOwnedError, StoreError
from icl.io.names import run_name
from icl.output import unbreakable_output


@attrs.frozen
class Ending:
    """How an attempt ended: an exit code, the run's step where it is known, and what went wrong.

    `code` is an `ExitCode`; that of a process that a signal ended is negative, as `subprocess` has it.
    """

    code: int
    run: str
    store: str
    step: int | None
    status: AttemptStatus
    error: str | None = None
    profile: dict[str, dict[str, float]] = attrs.field(factory=dict)

    def line(self) -> dict[str, Any]:
        """What `python -m icl.run` says on stdout, as plain data."""
        return {"run": self.run, "store": self.store, "step": self.step, "status": self.status}

    @property
    def reason(self) -> str:
        """Why it ended: what went wrong, or else its status."""
        return self.error or self.status


def attempt(
    spec: Spec,
    *,
    allow_backend_change: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, Mapping[str, float]], None] = lambda step, row: None,
    trace: str | None = None,
) -> Ending:
    """Train `spec` as `icl.loop.execute` does; what it raises becomes an ending."""
    from icl.loop import execute  # here, so that a command line that trains nothing needs no torch

    def ended(code: int, error: Exception, status: AttemptStatus = "failed") -> Ending:
        return Ending(code, run_name(spec), spec.run.store, None, status, str(error))

    try:
        outcome = execute(
            spec,
            allow_backend_change=allow_backend_change,
            should_stop=should_stop,
            progress=progress,
            trace=trace,
        )
    except SpecError as error:
        return ended(ExitCode.SPEC, error)
    except BackendUnavailableError as error:
        return ended(ExitCode.UNAVAILABLE, error)
    except RunOwnedError as error:
        return ended(ExitCode.OWNED, error, "running_elsewhere")
    except (StoreError, CheckpointError) as error:
        return ended(ExitCode.STORE, error)
    except NonFiniteLossError as error:
        return ended(ExitCode.NON_FINITE, error)
    code = ExitCode.INTERRUPTED if outcome.status == "interrupted" else ExitCode.COMPLETE
    return Ending(code, outcome.run, outcome.store, outcome.step, outcome.status, profile=outcome.profile)


def ending_of_process(code: int, run: str, store: str) -> Ending:
    """How an attempt ended whose process is gone and has not said so: it crashed, was killed, or left in the middle.

    Args:
        code: the process's exit code; negative for the signal that ended it. One that would say something of the run,
            which this process did not, is given as 1.
    """
    if code < 0:
        return Ending(code, run, store, None, "failed", f"the process was ended by {signal.Signals(-code).name}")
    error = f"the process ended with exit code {code}"
    if code == ExitCode.INTERRUPTED:
        return Ending(code, run, store, None, "interrupted", error)
    return Ending(ExitCode.INCOMPLETE, run, store, None, "failed", error)


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a command, or of what it raised; what a user can mend is said on stderr without a traceback.

    Nobody has to read what the command says: its code is the same when stdout and stderr are gone.
    """
    with unbreakable_output():
        try:
            return command()
        except SpecError as error:
            return _say(error, ExitCode.SPEC)
        except BackendUnavailableError as error:
            return _say(error, ExitCode.UNAVAILABLE)
        except (StoreError, CheckpointError) as error:
            return _say(error, ExitCode.STORE)


def _say(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
