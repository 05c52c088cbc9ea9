"""One attempt at a run, and how it ended: an exit code, a JSON line, and never a traceback for a user's mistake."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from icl.core.errors import BackendUnavailableError, NonFiniteLossError, SpecError
from icl.core.spec import Spec
from icl.io.errors import CheckpointError, RunOwnedError, StoreError
from icl.io.names import run_name
from icl.output import unbreakable_output
from icl.stopping import EXIT_INTERRUPTED

EXIT_SPEC, EXIT_BACKEND, EXIT_STORE, EXIT_NON_FINITE, EXIT_OWNED = 2, 3, 4, 5, 6
Status = Literal["complete", "already_complete", "interrupted", "running_elsewhere", "failed"]


@attrs.frozen
class Ending:
    """How an attempt ended: the process's exit code, the run's step where it is known, and what went wrong."""

    code: int
    run: str
    store: str
    step: int | None
    status: Status
    error: str | None = None
    profile: dict[str, dict[str, float]] = attrs.field(factory=dict)

    def line(self) -> dict[str, Any]:
        """What `python -m icl.run` says on stdout, as plain data."""
        return {"run": self.run, "store": self.store, "step": self.step, "status": self.status}


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

    def ended(code: int, error: Exception, status: Status = "failed") -> Ending:
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
        return ended(EXIT_SPEC, error)
    except BackendUnavailableError as error:
        return ended(EXIT_BACKEND, error)
    except RunOwnedError as error:
        return ended(EXIT_OWNED, error, "running_elsewhere")
    except (StoreError, CheckpointError) as error:
        return ended(EXIT_STORE, error)
    except NonFiniteLossError as error:
        return ended(EXIT_NON_FINITE, error)
    code = EXIT_INTERRUPTED if outcome.status == "interrupted" else 0
    return Ending(code, outcome.run, outcome.store, outcome.step, outcome.status, profile=outcome.profile)


def guarded(command: Callable[[], int]) -> int:
    """The exit code of a command, or of what it raised; what a user can mend is said on stderr without a traceback.

    Nobody has to read what the command says: its code is the same when stdout and stderr are gone.
    """
    with unbreakable_output():
        try:
            return command()
        except SpecError as error:
            return _say(error, EXIT_SPEC)
        except BackendUnavailableError as error:
            return _say(error, EXIT_BACKEND)
        except (StoreError, CheckpointError) as error:
            return _say(error, EXIT_STORE)


def _say(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
