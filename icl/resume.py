"""Where an attempt goes on from, and whether this backend may: the bits of one run come from one backend, or say so."""

import logging
from collections.abc import Callable, Mapping

import attrs
import orjson
from torch import Tensor

from icl.core.backend import Advance, Backend, Tree, description_changes
from icl.core.spec import Spec
from icl.core.step import Evaluate, init_state
from icl.io.errors import CheckpointError, MissingObjectError
from icl.io.rundir import RunDir
from icl.io.tensors import Metadata
from icl.io.writer import Writer

logger = logging.getLogger("icl")


@attrs.frozen
class Setup:
    """What an attempt trains with.

    Attributes:
        pool: `sample_task_pool(spec)`.
        advance, measure: what `build_train` and `build_eval` made for the backend.
        metadata: what every saved tensor file says of its origin.
        should_stop: asked after every chunk.
        progress: told after every chunk the step, and the metrics that are due there.
    """

    spec: Spec
    backend: Backend
    run: RunDir
    pool: Tensor | None
    advance: Advance
    measure: Evaluate
    metadata: Metadata
    writer: Writer
    should_stop: Callable[[], bool]
    progress: Callable[[int, Mapping[str, float]], None]


def state_to_go_on_from(
    run: RunDir, spec: Spec, backend: Backend, found: tuple[int, Tree, Metadata] | None, allow_backend_change: bool
) -> Tree:
    """The newest intact state, or the initialisation; what was published beyond it will be computed again.

    Args:
        found: `run.newest_state()`.

    Raises: CheckpointError when that state, or what was published beyond it, comes from another backend.
    """
    start = found[0] if found else 0
    before = [found[2]] if found else []
    changes = _changes(before + _published_beyond(run, start), backend)
    if changes and not allow_backend_change:
        raise CheckpointError(
            f"resume of {run.name} at step {start}: got another backend ({changes}); expected the one that computed "
            "what is saved, since the bits may differ. Run it there, or go on here with --allow-backend-change "
            "(in a notebook allow_backend_change=True)."
        )
    if changes:
        logger.warning("the backend changes at step %d (%s): the bits will differ", start, changes)
        run.set_aside_beyond(start)
    if found is None:
        return init_state(spec)
    logger.info("resuming %s from step %d", run.name, start)
    return found[1]


def require_same_backend(run: RunDir, metadata: Metadata, backend: Backend, why: str) -> None:
    """Raise CheckpointError, saying `why`, unless the backend is the one that a file's metadata describes."""
    changes = _changes([metadata], backend)
    if changes:
        raise CheckpointError(f"{run.name}: got another backend ({changes}); {why}")


def _changes(files: list[Metadata], backend: Backend) -> str:
    """How the backends that computed files differ from this one, in words; empty when they do not."""
    now = backend.describe()
    changes = {change for file in files for change in description_changes(orjson.loads(file["backend"]), now)}
    return "; ".join(sorted(changes))


def _published_beyond(run: RunDir, step: int) -> list[Metadata]:
    """The metadata of every intact file that goes beyond a step."""

    def metadata(file: tuple[str, str]) -> Metadata | None:
        try:
            return run.load(*file)[1]
        except (CheckpointError, MissingObjectError):  # it will be put aside, or is gone
            return None

    return [found for found in run.store.map(metadata, run.files_beyond(step)) if found is not None]
