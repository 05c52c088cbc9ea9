"""The imperative shell: one loop that joins core (what), a backend (where) and a store (kept where)."""

import logging
import os
import platform
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from typing import Literal

import attrs
import orjson
import torch
from torch import Tensor

from icl import __version__
from icl.backends import get_backend
from icl.core.backend import Backend, Tree
from icl.core.errors import NonFiniteLossError
from icl.core.metrics import TRAINING_LOSS
from icl.core.model import unflatten_params
from icl.core.plan import build_plan, plan_chunks
from icl.core.spec import Spec
from icl.core.step import build_eval, build_train, init_state
from icl.core.tasks import sample_batch_on_device, sample_batches, sample_task_pool, training_seed
from icl.io.codec import spec_to_data
from icl.io.errors import CheckpointError, StoreError
from icl.io.mirror import describe_wandb, mirrored
from icl.io.names import run_name
from icl.io.owner import owned
from icl.io.rundir import RunDir, open_run
from icl.io.store import open_store
from icl.io.tensors import Metadata
from icl.io.writer import Writer
from icl.profiling import Profile, Profiler

Progress = Callable[[int, Mapping[str, float]], None]
logger = logging.getLogger("icl")
SAVES_AT_ONCE = 8
_RECORDED = ("CUDA_", "ICL_", "MKL_", "OMP_", "PJRT_", "TPU_", "XLA_")  # variables that place or change a computation
_TRACED = (1, 4)  # chunks: the first compiles and is not like the others


@attrs.frozen
class Outcome:
    """How `execute` ended, and where the run is."""

    store: str
    run: str
    step: int
    status: Literal["complete", "already_complete", "interrupted"]
    profile: Profile = attrs.field(factory=dict)


def execute(
    spec: Spec,
    *,
    allow_backend_change: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Progress = lambda step, row: None,
    trace: str | None = None,
) -> Outcome:
    """Train `spec` from wherever its store left it, to the end or until `should_stop()`.

    The saved bits are a function of the spec alone on one backend, through any number of interruptions.

    Args:
        allow_backend_change: go on from a state computed on another backend (the bits will differ from either's).
        should_stop: asked after every chunk; when true the state is saved and the outcome is "interrupted".
        progress: told the step and the new metrics whenever there are some.
        trace: a local directory for a recording of the second to the fifth chunk and the effects between them.

    Raises: SpecError, BackendUnavailableError, StoreError (RunOwnedError when another process trains this run),
        CheckpointError, NonFiniteLossError.
    """
    total = spec.training.total_steps
    backend = get_backend(spec.run.backend, matmul_precision=spec.training.matmul_precision)
    run = open_run(open_store(spec.run.store), spec)
    if run.manifest.status() == "complete":
        with mirrored(spec, run.name, total, run.metrics) as mirror:
            mirror.status = "complete"
        return Outcome(spec.run.store, run.name, total, "already_complete")
    with owned(run.store, run.name, every=spec.run.heartbeat_seconds, should_stop=should_stop) as ownership:
        if ownership.lost:
            return Outcome(spec.run.store, run.name, max(run.state_steps(), default=0), "interrupted")
        if run.manifest.status() == "complete":  # since, by the process that owned it before
            return Outcome(spec.run.store, run.name, total, "already_complete")
        return _train(
            spec, backend, run, allow_backend_change, lambda: should_stop() or ownership.lost, progress, trace
        )


def _train(
    spec: Spec,
    backend: Backend,
    run: RunDir,
    allow_backend_change: bool,
    should_stop: Callable[[], bool],
    progress: Progress,
    trace: str | None,
) -> Outcome:
    total = spec.training.total_steps
    found = run.newest_state()
    start = found[0] if found else 0
    attempt = run.manifest.record_attempt(_describe_attempt(spec, backend, start))
    profiler = Profiler(backend.counters)
    pool = sample_task_pool(spec)
    chunks = list(plan_chunks(start, build_plan(spec).stops(), spec.run.max_chunk))
    persist = spec.run.on_save_failure == "continue"
    num_threads = run.store.concurrency(SAVES_AT_ONCE)
    with (
        ExitStack() as mirroring,  # which ends when everything is saved
        ExitStack() as tracing,
        _failure_recorded(run, attempt),
        Writer(persist=persist, num_threads=num_threads) as writer,
    ):
        state = _state_to_go_on_from(run, spec, backend, found, allow_backend_change)
        mirror = mirroring.enter_context(mirrored(spec, run.name, start, run.metrics))

        def tell(at: int, row: Mapping[str, float]) -> None:
            mirror.log(at, row)
            progress(at, row)

        with profiler.phase("evaluate"):
            session = _Session(spec, backend, run, pool, tell, profiler, writer, saved=start)
        state = backend.to_device(state)
        session.visit(start, state, save_state=False)
        advance = build_train(spec, backend)
        batches = _batches(spec, backend, pool, start, chunks)
        step, stopping = start, False
        for index, length in enumerate(chunks):
            if trace is not None and index == min(_TRACED[0], len(chunks) - 1):
                tracing.enter_context(backend.trace(trace))
            with profiler.phase("train"):
                state, metrics = advance(state, next(batches), length)
            step += length
            session.add(metrics, length)
            stopping = step < total and should_stop()
            session.visit(step, state, save_state=stopping)
            if index == _TRACED[1]:
                tracing.close()
            if stopping:
                break
        with profiler.phase("save"):
            writer.drain()
        status: Literal["complete", "interrupted"] = "interrupted" if stopping else "complete"
        if not stopping:
            writer.submit(lambda: run.manifest.mark_complete({"step": total}))
        mirror.status = status
        end = {"to_step": step, "status": status, "profile": profiler.profile, "wandb_url": mirror.url}
        writer.submit(lambda: run.manifest.record_end(attempt, end))
    return Outcome(spec.run.store, run.name, step, status, profiler.profile)


class _Session:
    """What has been computed since the last saved state, and the effects due at a step."""

    def __init__(
        self,
        spec: Spec,
        backend: Backend,
        run: RunDir,
        pool: Tensor | None,
        progress: Progress,
        profiler: Profiler,
        writer: Writer,
        saved: int,
    ) -> None:
        plan = build_plan(spec)
        self._checkpoint, self._evaluate = frozenset(plan.checkpoint), frozenset(plan.evaluate)
        self._save_state, self._log = frozenset(plan.save_state), frozenset(plan.log)
        self._spec, self._backend, self._run, self._progress, self._saved = spec, backend, run, progress, saved
        self._phase, self._submit = profiler.phase, writer.submit
        self._measure = build_eval(spec, backend, pool)
        self._pending: list[tuple[Tensor, int]] = []
        self._losses: list[Tensor] = []
        self._rows: dict[int, dict[str, float]] = {}
        self._metadata = {"backend": _encode(backend.describe()), "icl": __version__}

    def add(self, metrics: Tree, length: int) -> None:
        """Keep the losses of a chunk of that length on the device until the next effect."""
        self._pending.append((metrics[TRAINING_LOSS], length))

    def visit(self, step: int, state: Tree, *, save_state: bool) -> None:
        """Do what the plan says happens at `step`; with `save_state`, save the state there in any case."""
        save_state = save_state or step in self._save_state
        row: dict[str, float] = {}
        if save_state or step in self._checkpoint or step in self._evaluate or step in self._log:
            with self._phase("train"):
                self._fetch_losses(step)
            if self._losses:
                row[TRAINING_LOSS] = float(self._losses[-1][-1])
        if step in self._evaluate:
            with self._phase("evaluate"):
                self._rows[step] = self._measure(state)
            row |= self._rows[step]
        if step in self._checkpoint:
            with self._phase("save"):
                params = self._backend.to_cpu({"params": state["params"]})["params"]
                _require_finite(params, step)
                named = unflatten_params(self._spec, params)
                self._submit(
                    partial(self._run.save_checkpoint, step, named, self._metadata), params.nbytes, alone=False
                )
        if save_state and step > self._saved:
            with self._phase("save"):
                kept = self._backend.to_cpu(state)
                _require_finite(kept["params"], step)
                segment = (self._saved, step, torch.cat(self._losses), self._rows, self._metadata)
                self._submit(partial(self._run.save_segment, *segment), segment[2].nbytes)
                self._submit(partial(self._run.save_state, step, kept, self._metadata), 3 * kept["params"].nbytes)
            self._saved, self._losses, self._rows = step, [], {}
        if row:
            self._progress(step, row)

    def _fetch_losses(self, step: int) -> None:
        if not self._pending:
            return
        fetched = self._backend.to_cpu({str(i): losses for i, (losses, _) in enumerate(self._pending)})
        losses = torch.cat([fetched[str(i)][:length] for i, (_, length) in enumerate(self._pending)])
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            first = int(bad[0])
            raise NonFiniteLossError(
                f"training loss: got {float(losses[first])} at update {step - len(losses) + first + 1}; expected a "
                "finite number. Lower `training.schedule.learning_rate` or set `training.optimizer.max_grad_norm`."
            )
        self._losses.append(losses)
        self._pending = []


@contextmanager
def _failure_recorded(run: RunDir, attempt: str) -> Iterator[None]:
    """Have the manifest say why an attempt failed, where the store still takes it."""
    try:
        yield
    except Exception as error:
        with suppress(StoreError):
            run.manifest.record_end(attempt, {"status": "failed", "error": f"{type(error).__name__}: {error}"})
        raise


def _state_to_go_on_from(
    run: RunDir, spec: Spec, backend: Backend, found: tuple[int, Tree, Metadata] | None, allow_backend_change: bool
) -> Tree:
    """The newest intact state, or the initialisation."""
    if found is None:
        return init_state(spec)
    step, state, metadata = found
    then, now = orjson.loads(metadata["backend"]), backend.describe()
    changed = [
        f"{key} {then.get(key)} -> {now.get(key)}" for key in sorted({*then, *now}) if then.get(key) != now.get(key)
    ]
    if changed and not allow_backend_change:
        raise CheckpointError(
            f"resume of {run.name} at step {step}: got another backend ({'; '.join(changed)}); expected the one that "
            "computed the state, since the bits may differ. Run it there, or go on here with --allow-backend-change."
        )
    if changed:
        logger.warning("the backend changes at step %d (%s): the bits will differ", step, "; ".join(changed))
        run.set_aside_beyond(step)
    logger.info("resuming %s from step %d", run.name, step)
    return state


def _batches(spec: Spec, backend: Backend, pool: Tensor | None, start: int, chunks: list[int]) -> Iterator[Tree]:
    """Each chunk's batches on the device, `run.max_chunk` rows; the host samples one chunk ahead on a thread."""
    num_rows = spec.run.max_chunk
    firsts = accumulate(chunks, initial=start)
    ranges = [range(first, first + length) for first, length in zip(firsts, chunks, strict=False)]
    if spec.training.sampling == "device":
        generator = backend.manual_seed(0)
        on_device = backend.to_device({"pool": torch.empty(0) if pool is None else pool})
        draw = backend.compile(lambda tree: sample_batch_on_device(spec, tree["pool"], generator))
        stack = backend.compile(lambda *batches: {key: torch.stack([b[key] for b in batches]) for key in batches[0]})
        for steps in ranges:
            drawn = []
            for step in steps:
                backend.manual_seed(training_seed(spec, step))
                drawn.append(draw(on_device))
            yield stack(*drawn, *[drawn[-1]] * (num_rows - len(drawn)))
        return
    with ThreadPoolExecutor(1, thread_name_prefix="icl-sampling") as executor:
        queued = deque[Future[Tree]]()
        for steps in ranges:
            queued.append(executor.submit(sample_batches, spec, steps, pool, num_rows))
            if len(queued) > 1:
                yield backend.to_device(queued.popleft().result())
        for last in queued:
            yield backend.to_device(last.result())


def _require_finite(params: Tensor, step: int) -> None:
    if not bool(params.isfinite().all()):
        raise NonFiniteLossError(
            f"parameters after update {step}: got values that are not finite; expected finite ones. "
            "Lower `training.schedule.learning_rate` or set `training.optimizer.max_grad_norm`."
        )


def _describe_attempt(spec: Spec, backend: Backend, start: int) -> dict[str, object]:
    packages = ("torch", "numpy", "safetensors", "fsspec")
    return {
        "from_step": start,
        "started": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith(_RECORDED)},
        "versions": {"icl": __version__, **{package: version(package) for package in packages}},
        "backend": backend.describe(),
        "run": spec_to_data(spec)["run"],
        "wandb": describe_wandb(spec, run_name(spec)),
    }


def _encode(data: Mapping[str, str]) -> str:
    return orjson.dumps(dict(data), option=orjson.OPT_SORT_KEYS).decode()
