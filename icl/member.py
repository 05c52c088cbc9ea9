"""One run among those that are trained together: what belongs to it alone, from where it goes on to how it ends."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Literal, TypeAlias

import attrs
import orjson

from icl import __version__
from icl.batches import batches_on_device
from icl.core.backend import Backend, Tree
from icl.core.plan import build_plan, plan_chunks
from icl.core.spec import Spec
from icl.core.step import build_eval, build_train
from icl.core.tasks import sample_task_pool
from icl.core.words import counted
from icl.effects import Effects
from icl.io.errors import CheckpointError
from icl.io.mirror import mirrored
from icl.io.owner import Ownership, owned
from icl.io.rundir import RunDir, open_run
from icl.io.store import open_store
from icl.io.writer import Writer
from icl.late import compute_late, find_late
from icl.options import Options
from icl.profiling import Laps, Profile, Profiler
from icl.record import describe_attempt, failure_recorded
from icl.resume import Setup, state_to_go_on_from

SAVES_AT_ONCE = 8


@attrs.frozen
class Outcome:
    """How training a run ended, and where the run is."""

    store: str
    run: str
    step: int
    status: Literal["complete", "already_complete", "interrupted"]
    profile: Profile = attrs.field(factory=dict)


@attrs.define(eq=False)
class TrainingMember:
    """A run while it is trained: where it is, and the chunks that are left."""

    setup: Setup
    profiler: Profiler
    effects: Effects
    state: Tree
    step: int
    chunks: Sequence[int]
    batches: Iterator[Tree]
    num_trained: int = 0
    stopping: bool = False

    @property
    def is_trained(self) -> bool:
        """Whether no chunk is left, or a stop was asked for."""
        return self.stopping or self.num_trained == len(self.chunks)


Attempt: TypeAlias = Generator[TrainingMember, None, Outcome]


def attempt_run(spec: Spec, backend: Backend, laps: Laps, options: Options) -> Attempt:
    """An attempt at one run: yields it once when it is to be trained, if it is, and goes on when it has been.

    What goes wrong in between is thrown in here, so that the attempt says so in the store.
    """
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
        return (yield from _train(spec, backend, run, laps, owning, ownership))


def train_chunk(member: TrainingMember) -> None:
    """Advance a member by its next chunk, and do what is due after it."""
    visit(member, advance(member))


def advance(member: TrainingMember) -> Tree:
    """The metrics of the next chunk, whose end the member's state is at afterwards."""
    with member.profiler.phase("train"):
        length = member.chunks[member.num_trained]
        member.state, metrics = member.setup.advance(member.state, next(member.batches), length)
    return metrics


def visit(member: TrainingMember, metrics: Tree) -> None:
    """What is due after the chunk of those metrics."""
    length = member.chunks[member.num_trained]
    member.step += length
    member.num_trained += 1
    member.effects.add(metrics, length)
    setup = member.setup
    member.stopping = member.step < setup.spec.training.total_steps and setup.should_stop()
    member.effects.visit(member.step, member.state, save_state=member.stopping)


def _is_done(run: RunDir, spec: Spec) -> bool:
    """Whether the run is complete and has all that this spec asks for."""
    return run.manifest.status() == "complete" and not find_late(run, spec, spec.training.total_steps + 1).steps


def _train(spec: Spec, backend: Backend, run: RunDir, laps: Laps, options: Options, ownership: Ownership) -> Attempt:
    total = spec.training.total_steps
    found = run.newest_state()
    start = found[0] if found else 0
    complete = run.manifest.status() == "complete"
    passed = total if complete else start
    attempt = run.manifest.record_attempt(describe_attempt(spec, backend, passed))
    profiler = Profiler(laps)
    pool = sample_task_pool(spec)
    persist = spec.run.on_save_failure == "continue"
    num_threads = run.store.concurrency(SAVES_AT_ONCE)
    with (
        ExitStack() as mirroring,  # which ends when everything is saved
        failure_recorded(run, attempt, ownership),
        Writer(persist=persist, num_threads=num_threads) as writer,
    ):
        state = None if complete else state_to_go_on_from(run, spec, backend, found, options.allow_backend_change)
        late = find_late(run, spec, total + 1 if complete else start)
        mirror = mirroring.enter_context(mirrored(spec, run.name, passed, run.metrics))

        def tell(at: int, row: Mapping[str, float]) -> None:
            if row:
                mirror.log(at, row)
            options.progress(run.name, at, row)

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
            member = _member(setup, profiler, state, start)
            yield member
            step, stopping = member.step, member.stopping
        with profiler.phase("save"):
            writer.drain()
        status: Literal["complete", "interrupted"] = "interrupted" if stopping else "complete"
        if not stopping:
            _require_whole(run, spec)
            writer.submit(lambda: run.manifest.mark_complete({"step": total}))
        mirror.status = status
        end = {"to_step": step, "status": status, "profile": profiler.profile, "wandb_url": mirror.url}
        writer.submit(lambda: run.manifest.record_end(attempt, end))
    return Outcome(spec.run.store, run.name, step, status, profiler.profile)


def _require_whole(run: RunDir, spec: Spec) -> None:
    """Raise CheckpointError when some of what was saved is gone: its folder was removed, renamed or unmounted."""
    missing = sorted({*build_plan(spec).checkpoint} - {*run.checkpoint_steps()})
    gone = ["no spec.json"] if "spec.json" not in run.store.list(run.name) else []
    gone += [f"no checkpoint of {counted(len(missing), 'step')}"] if missing else []
    covered, total = run.covered_steps(), spec.training.total_steps
    gone += [f"no metrics from step {covered} on"] if covered < total else []
    if gone:
        raise CheckpointError(
            f"{run.store.url}/{run.name}: got {', '.join(gone)} at the end; expected what was saved. The folder was "
            "removed, or another is in its place. Put it back, or move what is there away, and run again."
        )


def _member(setup: Setup, profiler: Profiler, state: Tree, start: int) -> TrainingMember:
    """The run at step `start`, where everything due has been done."""
    spec, backend = setup.spec, setup.backend
    effects = Effects(setup, profiler, saved=start)
    on_device = backend.to_device(state)
    effects.visit(start, on_device, save_state=False)
    chunks = list(plan_chunks(start, build_plan(spec).stops(), spec.run.max_chunk))
    batches = batches_on_device(spec, backend, setup.pool, start, chunks, spec.run.max_chunk)
    return TrainingMember(setup, profiler, effects, on_device, start, chunks, batches)


def _encode(data: Mapping[str, str]) -> str:
    return orjson.dumps(dict(data), option=orjson.OPT_SORT_KEYS).decode()
