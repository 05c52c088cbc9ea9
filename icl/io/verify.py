"""Is a run intact: every digest recomputed, and gaps, strays and contradictions looked for. No fault ends it."""

from collections.abc import Iterable, Iterator
from functools import partial

import attrs

from icl.core.errors import SpecError
from icl.core.plan import spaced_steps
from icl.core.spec import Experiment
from icl.io.errors import CheckpointError, MissingObjectError, StoreError
from icl.io.manifest import RUN_OBJECTS, saved_steps, stored_experiment, with_run_half
from icl.io.rundir import KINDS, RunDir

_FOLDERS = RUN_OBJECTS - {"spec.json", "complete.json"}


def verify_run(run: RunDir) -> Iterator[str]:
    """Every fault of what is saved, naming the file."""
    experiment: Experiment | None = None
    try:
        experiment = stored_experiment(run.store, run.name)
    except (CheckpointError, StoreError) as error:
        yield str(error)
    run = attrs.evolve(run, experiment=experiment)
    yield from _caught(_strays(run))
    yield from _caught(_owner_faults(run))
    damage = [fault for folder in KINDS for fault in _caught(_tensor_faults(run, folder))]
    damage += [*_caught(_attempt_faults(run)), *_caught(_completion_faults(run))]
    yield from damage
    if not damage:
        yield from _caught(_gaps(run))


def _caught(faults: Iterator[str]) -> Iterator[str]:
    """The faults, and last what ended the search for them, if anything did."""
    try:
        yield from faults
    except (CheckpointError, StoreError) as error:
        yield str(error)


def _strays(run: RunDir) -> Iterator[str]:
    inside = set(run.store.list(run.name))
    for stray in sorted(inside - RUN_OBJECTS):
        yield f"{run.name}/{stray}: got a stray object; expected one of {', '.join(sorted(RUN_OBJECTS))}."
    for name in sorted(inside & _FOLDERS):
        if not run.store.is_folder(f"{run.name}/{name}"):
            yield f"{run.name}/{name}: got what is no folder; expected one. Put the folder back, or move it away."


def _owner_faults(run: RunDir) -> Iterator[str]:
    """Heartbeats that cannot be read, so that nobody can train the run."""
    for name in run.store.list(f"{run.name}/owner"):
        try:
            run.store.read(f"{run.name}/owner/{name}")
        except MissingObjectError:  # an owner that has just ended
            continue
        except CheckpointError as error:
            yield str(error)


def _tensor_faults(run: RunDir, folder: str) -> Iterator[str]:
    paths = [f"{run.name}/{folder}/{file}" for file in run.store.list(f"{run.name}/{folder}")]
    yield from (fault for fault in run.store.map(partial(_fault_of, run, folder), paths) if fault)


def _fault_of(run: RunDir, folder: str, path: str) -> str | None:
    """What is wrong with one file of tensors."""
    try:
        run.load(folder, path)
    except MissingObjectError as error:
        # A run that goes on meanwhile removes old states.
        return None if folder == "state" else str(error)
    except (CheckpointError, StoreError) as error:
        return str(error)
    return None


def _attempt_faults(run: RunDir) -> Iterator[str]:
    for name in run.store.list(f"{run.name}/attempts"):
        path = f"{run.name}/attempts/{name}"
        try:
            info = run.manifest.read_attempt(name)
            if run.experiment is not None:
                with_run_half(run.experiment, info)
        except SpecError as error:
            yield f"{path}: got a run half that this version does not understand ({error}); expected one of its own."
        except (CheckpointError, StoreError) as error:
            yield str(error)


def _completion_faults(run: RunDir) -> Iterator[str]:
    if "complete.json" not in run.store.list(run.name):
        return
    path = f"{run.name}/complete.json"
    complete = run.manifest.completion()
    if run.experiment is not None and complete.step != run.experiment.training.total_steps:
        yield f"{path}: got step {complete.step}; expected total_steps={run.experiment.training.total_steps}."


def _promised_checkpoints(run: RunDir, experiment: Experiment) -> Iterable[int]:
    """The steps that attempts which completed were to save, or all attempts if they had one cadence; else the ends."""
    total = experiment.training.total_steps
    halves = run.manifest.run_halves(experiment)
    cadences = {half.checkpoint_at for half, has_all in halves if half and has_all}
    cadences = cadences or {half.checkpoint_at for half, _ in halves if half}
    if len(cadences) > 1 and not any(has_all for _, has_all in halves):
        return 0, total
    return {0, total}.union(*(spaced_steps(cadence, total) for cadence in cadences))


def _gaps(run: RunDir) -> Iterator[str]:
    """What is not there or contradicts itself."""
    try:
        run.metrics()
    except CheckpointError as error:
        yield str(error)
    if run.experiment is not None and "complete.json" in run.store.list(run.name):
        total = run.experiment.training.total_steps
        expected = [("state", total), *(("checkpoints", step) for step in _promised_checkpoints(run, run.experiment))]
        saved = {folder: set(saved_steps(run.store, run.name, folder)) for folder in ("checkpoints", "state")}
        for folder, step in expected:
            if step not in saved[folder]:
                yield f"{run.step_path(folder, step)}: got nothing; expected it in a complete run."
    covered = run.covered_steps()
    if covered < max(run.state_steps(), default=0):
        yield f"{run.name}/metrics: got no segment from step {covered}; expected metrics up to the newest state."
