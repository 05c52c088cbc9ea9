"""When something that failed is tried again: one policy for runs, devices, agents and the machines of a fleet."""

import signal

import attrs

from icl.attempt import Ending
from icl.exit_codes import ExitCode

_ENDED_BY_SOMEBODY = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


@attrs.frozen
class RetryPolicy:
    """How often, and after what pause.

    `max_attempts`: a run has failed after so many attempts in a row that got it no further.
    `max_worker_failures`: a device takes no more runs after so many failures in a row, so that a bad chip spoils none.
    `max_job_restarts`: a machine of a fleet starts its part of the sweep again after so many errors.
    """

    max_attempts: int = 5
    max_worker_failures: int = 5
    max_job_restarts: int = 3
    longest_pause: float = 60.0  # seconds
    pause_for_owner: float = 10.0  # seconds before a run that another process trains is tried again

    def pause_after(self, failures: int) -> float:
        """Seconds before trying again after so many failures in a row: none after the first, then 1, 2, 4, ..."""
        return min(self.longest_pause, 2.0 ** (failures - 2)) if failures > 1 else 0.0

    def is_final(self, ending: Ending, attempts: int) -> bool:
        """Whether a run has failed after so many attempts in a row that got it no further, the last of which ended so.

        A non-finite loss and a spec that cannot be trained fail at once, since the same would come again.
        """
        return ending.code in (ExitCode.NON_FINITE, ExitCode.SPEC) or attempts >= self.max_attempts


def counts_against_run(ending: Ending) -> bool:
    """Whether a failed attempt is one of those that a run has; a missing device is not the run's fault."""
    return ending.code != ExitCode.UNAVAILABLE


def counts_against_device(ending: Ending) -> bool:
    """Whether an attempt may have failed because of where it ran; a process that somebody ended did not."""
    crashed = ending.code < 0 and ending.code not in _ENDED_BY_SOMEBODY
    return crashed or ending.code in (ExitCode.INCOMPLETE, ExitCode.UNAVAILABLE, ExitCode.STORE)
