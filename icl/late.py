"""Checkpoints and evaluations asked for after training has passed them: computed again, proved right, then saved."""

import logging
from functools import partial

import attrs
import torch
from torch import Tensor

from icl.batches import batches_on_device
from icl.core.backend import Tree, identical
from icl.core.metrics import TRAINING_LOSS
from icl.core.model import unflatten_params
from icl.core.plan import Plan, build_plan, plan_chunks
from icl.core.spec import Spec
from icl.core.step import init_state
from icl.core.words import counted
from icl.io.errors import CheckpointError
from icl.io.rundir import RunDir
from icl.resume import Setup, require_same_backend

logger = logging.getLogger("icl")


@attrs.frozen
class Late:
    """Steps that the spec asks for, that training has passed, and whose checkpoint or evaluation is not saved."""

    checkpoints: frozenset[int]
    evaluations: frozenset[int]

    @property
    def steps(self) -> list[int]:
        """All of them, ascending."""
        return sorted(self.checkpoints | self.evaluations)

    def __str__(self) -> str:
        parts = ((self.checkpoints, "checkpoint"), (self.evaluations, "evaluation"))
        return " and ".join(counted(len(steps), name) for steps, name in parts if steps)


def find_late(run: RunDir, spec: Spec, before: int) -> Late:
    """What the spec asks for at steps less than `before`, which training will not visit again, and is not saved."""
    plan = build_plan(spec)
    missing = frozenset(step for step in plan.checkpoint if step < before) - {*run.checkpoint_steps()}
    return Late(missing, _unevaluated(run, spec, plan, before))


def _unevaluated(run: RunDir, spec: Spec, plan: Plan, before: int) -> frozenset[int]:
    halves = [
        (half and half.evaluate_at == spec.run.evaluate_at, has_all) for half, has_all in run.manifest.run_halves(spec)
    ]
    if all(same for same, _ in halves) or (True, True) in halves:
        return frozenset()
    evaluated = {step for step, row in run.metrics().items() if row.keys() - {TRAINING_LOSS}}
    return frozenset(step for step in plan.evaluate if step < before) - evaluated


def compute_late(late: Late, setup: Setup) -> bool:
    """Train once more over the steps of `late` and save them; whether that was done, or a stop was asked for first.

    It begins at the newest state before them, or at the initialisation, and ends at a saved step after them. What is
    computed is published only when the next saved step is met bit for bit; states are kept on the way, to go on from
    after a stop, and removed at the end.

    Raises: CheckpointError when the backend is another than that of the run, or a saved step is not met.
    """
    spec, backend, run = setup.spec, setup.backend, setup.run
    known = _known_steps(run)
    end = min((step for step in known if step >= max(late.steps[-1], 1)), default=None)
    if end is None:
        raise CheckpointError(
            f"{run.name}: got complete.json and nothing saved from step {late.steps[-1]} on; expected the last state. "
            "Move complete.json away and run again: training goes on from what is there."
        )
    wanted = f"{late} asked for after training had passed them"
    require_same_backend(
        run,
        run.load(*known[end])[1],
        backend,
        f"expected the one that computed the run, to compute {wanted}, whatever may go on with it. Run it there, or "
        "ask for the cadences that the run was trained with (run.checkpoint_at, run.evaluate_at).",
    )
    # An evaluation is saved with updates that lead to a saved step, so there must be some.
    start, state = _nearest_state(run, spec, min(late.steps[0], end - 1) if late.evaluations else late.steps[0])
    logger.info("computing %s: from step %d to %d", wanted, start, end)
    stops = [step for step in {*late.steps, *known} if start < step <= end]
    chunks = list(plan_chunks(start, stops, spec.run.max_chunk))
    batches = batches_on_device(spec, backend, setup.pool, start, chunks, spec.run.max_chunk)
    on_device, step = backend.to_device(state), start
    found, kept = _Found(start), start
    for length in (0, *chunks):
        if length:
            on_device, metrics = setup.advance(on_device, next(batches), length)
            found.losses.append(backend.to_cpu(metrics)[TRAINING_LOSS][:length])
            step += length
        row: dict[str, float] = setup.measure(on_device, step) if step in late.evaluations else {}
        if row:
            found.rows[step] = row
        if step in late.checkpoints or step in known:
            vector = backend.to_cpu({"params": on_device["params"]})["params"]
            if step in late.checkpoints:
                found.checkpoints[step] = unflatten_params(spec, vector)
            if step in known:
                _require_met(spec, run, *known[step], vector, wanted)
                _publish(found, step, setup)
                if kept + spec.run.save_state_every <= step < end:
                    state, kept = backend.to_cpu(on_device), step
                    setup.writer.submit(partial(run.publish_state, step, state, setup.metadata))
        setup.progress(step, row)
        if step < end and setup.should_stop():
            return False
    setup.writer.submit(run.remove_old_states)
    return True


@attrs.define
class _Found:
    """What was computed since the last step that was met."""

    since: int
    checkpoints: dict[int, Tree] = attrs.field(factory=dict)
    rows: dict[int, dict[str, float]] = attrs.field(factory=dict)
    losses: list[Tensor] = attrs.field(factory=list)


def _publish(found: _Found, step: int, setup: Setup) -> None:
    """Save what was computed up to `step`, which was met; rows of a first step wait for the updates after it."""
    run, metadata = setup.run, setup.metadata
    for at, params in found.checkpoints.items():
        setup.writer.submit(partial(run.save_checkpoint, at, params, metadata), alone=False)
    found.checkpoints = {}
    if step > found.since:
        if found.rows:
            losses = torch.cat(found.losses)
            setup.writer.submit(partial(run.save_segment, found.since, step, losses, found.rows, metadata))
        found.since, found.rows, found.losses = step, {}, []


def _known_steps(run: RunDir) -> dict[int, tuple[str, str]]:
    """Folder and path of a saved file of parameters for every step that has one."""
    folders = {"state": run.state_steps(), "checkpoints": run.checkpoint_steps()}
    return {step: (folder, run.step_path(folder, step)) for folder, steps in folders.items() for step in steps}


def _nearest_state(run: RunDir, spec: Spec, step: int) -> tuple[int, Tree]:
    """The newest intact state at or before a step, or the initialisation."""
    found = run.newest_state(step)
    return (found[0], found[1]) if found else (0, init_state(spec))


def _require_met(spec: Spec, run: RunDir, folder: str, path: str, vector: Tensor, wanted: str) -> None:
    saved = run.load(folder, path)[0]
    if not identical(saved, {**saved, "params": vector} if folder == "state" else unflatten_params(spec, vector)):
        raise CheckpointError(
            f"{path}: got other parameters when computing {wanted}; expected those saved there. Nothing was changed. "
            "The run was computed by another machine or version; ask for the cadences that it was trained with."
        )
