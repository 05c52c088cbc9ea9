"""The imperative shell: one loop that joins core (what), a backend (where) and a store (kept where)."""

import logging
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Literal

import attrs
import orjson

from icl import __version__
from icl.backends import get_backend
from icl.backends.numerics import pinned_numerics
from icl.backends.threads import resolve_threads
from icl.batches import batches_on_device
from icl.core.backend import Backend, Tree
from icl.core.estimate import check_fits
from icl.core.plan import build_plan, plan_chunks
from icl.core.spec import Spec
from icl.core.step import build_eval, build_train
from icl.core.tasks import sample_task_pool
from icl.effects import Effects
from icl.io.codec import spec_to_data
from icl.io.errors import StoreError
from icl.io.mirror import describe_wandb, mirrored
from icl.io.names import run_name
from icl.io.owner import owned
from icl.io.rundir import RunDir, open_run
from icl.io.store import open_store
from icl.io.writer import Writer
from icl.late import compute_late, find_late
from icl.machine import allowed_cores, allowed_memory, processor
from icl.profiling import Profile, Profiler
from icl.resume import Progress, Setup, state_to_go_on_from

logger = logging.getLogger("icl")
SAVES_AT_ONCE = 8
_RECORDED = (  # beginnings of variables that place a computation, change it or slow it down
    *("ATEN_", "CUBLAS_", "CUDA_", "DNNL_", "GOMP_", "ICL_", "KMP_", "LIBTPU_", "MKL_", "NVIDIA_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PJRT_", "PYTORCH_", "TORCH_", "TPU_", "XLA_"),
)
_TRACED = (1, 4)  # chunks: the first compiles and is not like the others


@attrs.frozen
class Outcome:
    """How `execute` ended, and where the run is."""

    store: str
    run: str
    step: int
    status: Literal["complete", "already_complete", "interrupted"]
    profile: Profile = attrs.field(factory=dict)


@attrs.frozen
class _Options:
    """What `execute` was asked for besides the spec."""

    allow_backend_change: bool
    should_stop: Callable[[], bool]
    progress: Progress
    trace: str | None


def execute(
    spec: Spec,
    *,
    backend: Backend | None = None,
    allow_backend_change: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress = lambda step, row: None,
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
    threads = resolve_threads(spec.run.threads)
    if (spec.run.threads or 0) > allowed_cores():
        logger.warning("run.threads: %d share the %d cores allowed here: steps will be slow", threads, allowed_cores())
    with pinned_numerics(threads=threads):
        check_fits(spec, allowed_memory())
        if backend is None:
            backend = get_backend(spec.run.backend, matmul_precision=spec.training.matmul_precision, threads=threads)
        return _execute(spec, backend, _Options(allow_backend_change, should_stop, progress, trace))


def _execute(spec: Spec, backend: Backend, options: _Options) -> Outcome:
    total = spec.training.total_steps
    run = open_run(open_store(spec.run.store), spec)
    if _is_done(run, spec):
        with mirrored(spec, run.name, total, run.metrics) as mirror:
            mirror.status = "complete"
        return Outcome(spec.run.store, run.name, total, "already_complete")
    with owned(run.store, run.name, every=spec.run.heartbeat_seconds, should_stop=options.should_stop) as ownership:
        if ownership.lost:
            return Outcome(spec.run.store, run.name, max(run.state_steps(), default=0), "interrupted")
        if _is_done(run, spec):  # since, by the process that owned it before
            return Outcome(spec.run.store, run.name, total, "already_complete")
        owning = attrs.evolve(options, should_stop=lambda: options.should_stop() or ownership.lost)
        return _train(spec, backend, run, owning)


def _is_done(run: RunDir, spec: Spec) -> bool:
    """Whether the run is complete and has all that this spec asks for."""
    return run.manifest.status() == "complete" and not find_late(run, spec, spec.training.total_steps + 1).steps


def _train(spec: Spec, backend: Backend, run: RunDir, options: _Options) -> Outcome:
    total = spec.training.total_steps
    found = run.newest_state()
    start = found[0] if found else 0
    complete = run.manifest.status() == "complete"
    passed = total if complete else start
    attempt = run.manifest.record_attempt(_describe_attempt(spec, backend, passed))
    profiler = Profiler(backend.counters)
    pool = sample_task_pool(spec)
    persist = spec.run.on_save_failure == "continue"
    num_threads = run.store.concurrency(SAVES_AT_ONCE)
    with (
        ExitStack() as mirroring,  # which ends when everything is saved
        _failure_recorded(run, attempt),
        Writer(persist=persist, num_threads=num_threads) as writer,
    ):
        state = None if complete else state_to_go_on_from(run, spec, backend, found, options.allow_backend_change)
        late = find_late(run, spec, total + 1 if complete else start)
        mirror = mirroring.enter_context(mirrored(spec, run.name, passed, run.metrics))

        def tell(at: int, row: Mapping[str, float]) -> None:
            if row:
                mirror.log(at, row)
            options.progress(at, row)

        with profiler.phase("evaluate"):
            measure = build_eval(spec, backend, pool)
        setup = Setup(
            spec=spec,
            backend=backend,
            run=run,
            pool=pool,
            advance=build_train(spec, backend, num_steps=spec.run.max_chunk),
            measure=measure,
            metadata={"backend": _encode(backend.describe()), "icl": __version__},
            writer=writer,
            should_stop=options.should_stop,
            progress=tell,
        )
        step, stopping = passed, False
        if late.steps:
            with profiler.phase("late"):
                stopping = not compute_late(late, setup)
        if state is not None and not stopping:
            step, stopping = _fold(setup, profiler, state, start, options.trace)
        with profiler.phase("save"):
            writer.drain()
        status: Literal["complete", "interrupted"] = "interrupted" if stopping else "complete"
        if not stopping:
            writer.submit(lambda: run.manifest.mark_complete({"step": total}))
        mirror.status = status
        end = {"to_step": step, "status": status, "profile": profiler.profile, "wandb_url": mirror.url}
        writer.submit(lambda: run.manifest.record_end(attempt, end))
    return Outcome(spec.run.store, run.name, step, status, profiler.profile)


def _fold(setup: Setup, profiler: Profiler, state: Tree, start: int, trace: str | None) -> tuple[int, bool]:
    """Train from `start` to the end, with every effect on the way; the last step, and whether a stop was asked for."""
    spec, backend, step, stopping = setup.spec, setup.backend, start, False
    effects = Effects(setup, profiler, saved=start)
    state = backend.to_device(state)
    effects.visit(start, state, save_state=False)
    chunks = list(plan_chunks(start, build_plan(spec).stops(), spec.run.max_chunk))
    batches = batches_on_device(spec, backend, setup.pool, start, chunks, spec.run.max_chunk)
    with ExitStack() as tracing:
        for index, length in enumerate(chunks):
            if trace is not None and index == min(_TRACED[0], len(chunks) - 1):
                tracing.enter_context(backend.trace(trace))
            with profiler.phase("train"):
                state, metrics = setup.advance(state, next(batches), length)
            step += length
            effects.add(metrics, length)
            stopping = step < spec.training.total_steps and setup.should_stop()
            effects.visit(step, state, save_state=stopping)
            if index == _TRACED[1]:
                tracing.close()
            if stopping:
                break
    return step, stopping


@contextmanager
def _failure_recorded(run: RunDir, attempt: str) -> Iterator[None]:
    """Have the manifest say why an attempt failed, where the store still takes it."""
    try:
        yield
    except Exception as error:
        with suppress(StoreError):
            run.manifest.record_end(attempt, {"status": "failed", "error": f"{type(error).__name__}: {error}"})
        raise


def _describe_attempt(spec: Spec, backend: Backend, start: int) -> dict[str, object]:
    packages = ("torch", "numpy", "safetensors", "fsspec")
    return {
        "from_step": start,
        "started": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": allowed_cores(),
        "command": sys.argv,
        "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith(_RECORDED)},
        "versions": {"icl": __version__, **{package: version(package) for package in packages}},
        "backend": backend.describe(),
        "run": spec_to_data(spec)["run"],
        "wandb": describe_wandb(spec, run_name(spec)),
    }


def _encode(data: Mapping[str, str]) -> str:
    return orjson.dumps(dict(data), option=orjson.OPT_SORT_KEYS).decode()
