"""Is a run intact: every digest recomputed, and gaps, strays and contradictions looked for."""

from collections.abc import Iterable, Iterator

from icl.core.plan import build_plan
from icl.core.spec import Spec
from icl.io.documents import decode_document
from icl.io.errors import CheckpointError, MissingObjectError
from icl.io.manifest import read_spec, saved_steps, stored_spec
from icl.io.rundir import KINDS, RunDir

_KNOWN = {"spec.json", "attempts", "checkpoints", "state", "metrics", "complete.json", "owner", "superseded"}


def verify_run(run: RunDir) -> Iterator[str]:
    """Every fault of what is saved, naming the file."""
    spec: Spec | None = None
    try:
        spec = stored_spec(run.store, run.name)
    except (CheckpointError, MissingObjectError) as error:
        yield str(error)
    inside = run.store.list(run.name)
    for stray in sorted(set(inside) - _KNOWN):
        yield f"{run.name}/{stray}: got a stray object; expected one of {', '.join(sorted(_KNOWN))}."
    paths = [f"{run.name}/{folder}/{file}" for folder in KINDS for file in run.store.list(f"{run.name}/{folder}")]
    damage = [fault for fault in run.store.map(lambda path: _fault_of(run, path), paths) if fault]
    yield from damage
    documents = [f"{run.name}/attempts/{name}" for name in run.store.list(f"{run.name}/attempts")]
    damaged = bool(damage)
    complete = f"{run.name}/complete.json"
    for path in [*documents, *([complete] if "complete.json" in inside else [])]:
        try:
            info = decode_document(run.store.read(path), path)
        except CheckpointError as error:
            damaged = True
            yield str(error)
            continue
        if path == complete and spec is not None and info.get("step") != spec.training.total_steps:
            yield f"{path}: got another step; expected total_steps={spec.training.total_steps}."
    if not damaged:
        yield from _gaps(run, spec if "complete.json" in inside else None)


def _fault_of(run: RunDir, path: str) -> str | None:
    """What is wrong with one file of tensors."""
    folder = path.split("/")[1]
    try:
        run.load(folder, path)
    except CheckpointError as error:
        return str(error)
    except MissingObjectError as error:
        # A run that goes on meanwhile removes old states.
        return None if folder == "state" else str(error)
    return None


def _promised_checkpoints(run: RunDir, spec: Spec) -> Iterable[int]:
    """The steps that every attempt was to save; only the ends when the attempts had different cadences."""
    cadences = [attempt["run"]["checkpoint_at"] for attempt in run.manifest.attempts() if "run" in attempt]
    if not cadences or any(cadence != cadences[0] for cadence in cadences):
        return 0, spec.training.total_steps
    return build_plan(read_spec(run.store, run.name)).checkpoint


def _gaps(run: RunDir, complete: Spec | None) -> Iterator[str]:
    """What is not there or contradicts itself, `complete` being the spec of a complete run."""
    try:
        run.metrics()
    except CheckpointError as error:
        yield str(error)
    if complete is not None:
        total = complete.training.total_steps
        expected = [("state", total), *(("checkpoints", step) for step in _promised_checkpoints(run, complete))]
        saved = {folder: set(saved_steps(run.store, run.name, folder)) for folder in ("checkpoints", "state")}
        for folder, step in expected:
            if step not in saved[folder]:
                yield f"{run.step_path(folder, step)}: got nothing; expected it in a complete run."
    covered = 0
    for _, start, stop in run.segments():
        if start <= covered:
            covered = max(covered, stop)
    if covered < max(run.state_steps(), default=0):
        yield f"{run.name}/metrics: got no segment from step {covered}; expected metrics up to the newest state."
