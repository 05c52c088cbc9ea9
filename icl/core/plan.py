"""Which steps evaluate, save and log, and how a run is cut into chunks. Pure integers."""

import math
from collections.abc import Iterable, Iterator

import attrs

from icl.core.spec import Spec, StepsSpec

_EVALUATION_ROWS = 4096  # sequences predicted at once


def spaced_steps(steps: StepsSpec, total_steps: int) -> tuple[int, ...]:
    """The distinct steps of a cadence, ascending: 0, `total_steps`, and those asked for.

    `log` steps are spaced geometrically over [1, N], `linear` ones evenly over [0, N], both ends included, rounded to
    integers. Coinciding steps count once, so the result may hold fewer than log + linear; its length is the truth.
    """
    chosen = {0, total_steps, *steps.also}
    last = max(steps.log - 1, 1)
    chosen.update(round(total_steps ** (i / last)) for i in _log_indices(steps.log, total_steps))
    # More of them than steps are all steps.
    linear = min(steps.linear, total_steps + 1)
    chosen.update(round(total_steps * i / max(linear - 1, 1)) for i in range(linear))
    return tuple(sorted(chosen))


def _log_indices(count: int, total_steps: int) -> Iterable[int]:
    """Which of `count` geometrically spaced points to round: no more than four a step, however many are asked for."""
    if count <= 4 * total_steps or total_steps == 1:
        return range(min(count, 4 * total_steps))
    # A step is reached if one of the points nearest to it rounds to it; points further away may round to it as well.
    nearest = (math.floor((count - 1) * math.log(step) / math.log(total_steps)) for step in range(1, total_steps + 1))
    return (min(max(i + offset, 0), count - 1) for i in nearest for offset in (-1, 0, 1, 2))


@attrs.frozen
class Plan:
    """The steps at which something happens besides training."""

    checkpoint: tuple[int, ...]
    evaluate: tuple[int, ...]
    save_state: tuple[int, ...]
    log: tuple[int, ...]

    def stops(self) -> tuple[int, ...]:
        """Every step at which a chunk must end, ascending."""
        return tuple(sorted({*self.checkpoint, *self.evaluate, *self.save_state, *self.log}))


def build_plan(spec: Spec) -> Plan:
    """The plan of a spec; the initialisation and the last step are always checkpoints, evaluated and resumable."""
    total, run = spec.training.total_steps, spec.run
    return Plan(
        checkpoint=spaced_steps(run.checkpoint_at, total),
        evaluate=spaced_steps(run.evaluate_at, total),
        save_state=(*range(run.save_state_every, total, run.save_state_every), total),
        log=(*range(run.log_every, total, run.log_every), total),
    )


def plan_chunks(start: int, stops: Iterable[int], max_chunk: int) -> Iterator[int]:
    """Chunk lengths from `start` to every later stop, at most `max_chunk` each, ending exactly at each stop."""
    for stop in sorted(stops):
        while start < stop:
            length = min(max_chunk, stop - start)
            yield length
            start += length


def evaluation_slices(batch_size: int) -> tuple[int, int]:
    """Into how many slices of how many sequences, all equal, an evaluation set is cut."""
    slices = -(-batch_size // _EVALUATION_ROWS)
    return slices, -(-batch_size // slices)
