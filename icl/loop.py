"""The imperative shell: one loop that joins core (what), a backend (where) and a store (kept where)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import count

from icl.backends import get_backend
from icl.backends.numerics import pinned_numerics
from icl.backends.threads import resolve_threads
from icl.core.backend import Backend
from icl.core.errors import SpecError
from icl.core.estimate import check_fits
from icl.core.spec import Spec
from icl.io.names import run_name
from icl.machine import allowed_cores, allowed_memory
from icl.member import Attempt, Outcome, TrainingMember, attempt_run, train_chunk
from icl.options import Options
from icl.profiling import Laps

logger = logging.getLogger("icl")
_TRACED = (1, 4)  # chunks: the first compiles and is not like the others


def execute(
    spec: Spec,
    *,
    backend: Backend | None = None,
    allow_backend_change: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, Mapping[str, float]], None] = lambda step, row: None,
    trace: str | None = None,
) -> Outcome:
    """Train `spec` from wherever its store left it, to the end or until `should_stop()`.

    The saved bits are a function of the spec alone on one backend, through any number of interruptions.

    Args:
        backend: to train on; None for the one that `run.backend` names.
        allow_backend_change: go on from a state computed on another backend (the bits will differ from either's).
        should_stop: asked after every chunk; when true the state is saved and the outcome is "interrupted".
        progress: told after every chunk the step, and the metrics that are due there, if any.
        trace: a local directory for a recording of the second to the fifth chunk and the effects between them.

    Raises: SpecError, BackendUnavailableError, StoreError (RunOwnedError when another process trains this run),
        CheckpointError, NonFiniteLossError.
    """
    options = Options(allow_backend_change, should_stop, lambda run, step, row: progress(step, row), trace)
    (ending,) = execute_members((spec,), options, backend=backend)
    if isinstance(ending, Exception):
        raise ending
    return ending


def execute_members(
    specs: Sequence[Spec], options: Options, *, backend: Backend | None = None
) -> tuple[Outcome | Exception, ...]:
    """Train several runs side by side in this process, a chunk of each in turn; how each ended, in their order.

    Law: each has the bits that it has when it is trained alone. What fails ends its own run and no other.

    Args:
        specs: with one run half, one `training.matmul_precision`, and no run twice.
        backend: to train on; None for the one that `run.backend` names.

    Returns: for each spec its outcome, or what `execute` would have raised.
    Raises: SpecError and BackendUnavailableError before anything is begun.
    """
    _require_one_place(specs)
    if not specs:
        return ()
    how = specs[0].run
    threads = resolve_threads(how.threads)
    if (how.threads or 0) > allowed_cores():
        logger.warning("run.threads: %d share the %d cores allowed here: steps will be slow", threads, allowed_cores())
    with pinned_numerics(threads=threads):
        for spec in specs:
            check_fits(spec, allowed_memory())
        if backend is None:
            precision = specs[0].training.matmul_precision
            backend = get_backend(how.backend, matmul_precision=precision, threads=threads)
        laps = Laps(backend.counters)
        with ExitStack() as stack:
            attempts = [stack.enter_context(closing(attempt_run(each, backend, laps, options))) for each in specs]
            return _train_together(attempts, backend, options.trace)


def _require_one_place(specs: Sequence[Spec]) -> None:
    names = [run_name(spec) for spec in specs]
    faults = [
        f"got the run {name} twice; expected it once" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    if any(spec.run != specs[0].run for spec in specs):
        faults.append("run: got several; expected one, since the runs share a process")
    if len({spec.training.matmul_precision for spec in specs}) > 1:
        faults.append("training.matmul_precision: got several; expected one, which the backend obeys")
    if faults:
        raise SpecError(*(f"runs trained together: {fault}. Train them apart." for fault in faults))


def _train_together(
    attempts: Sequence[Attempt], backend: Backend, trace: str | None
) -> tuple[Outcome | Exception, ...]:
    """Begin every attempt, advance all that train chunk by chunk, and end each when it is trained or has failed."""
    endings: dict[int, Outcome | Exception] = {}
    training: dict[int, TrainingMember] = {}

    def go_on(index: int, error: Exception | None = None) -> None:
        """Let an attempt go on up to where its run is to be trained, or to its end."""
        training.pop(index, None)
        try:
            training[index] = attempts[index].throw(error) if error else next(attempts[index])
        except StopIteration as ended:
            endings[index] = ended.value
        except Exception as failure:
            endings[index] = failure

    for index in range(len(attempts)):
        go_on(index)
    longest = max((len(member.chunks) for member in training.values()), default=0)
    with ExitStack() as tracing:
        for number in count():
            for index in [index for index, member in training.items() if member.is_trained]:
                go_on(index)
            if not training:
                break
            if trace is not None and number == min(_TRACED[0], longest - 1):
                tracing.enter_context(backend.trace(trace))
            for index, member in list(training.items()):
                try:
                    train_chunk(member)
                except Exception as error:
                    go_on(index, error)
            if number == _TRACED[1] or all(member.is_trained for member in training.values()):
                tracing.close()
    return tuple(endings[index] for index in range(len(attempts)))
