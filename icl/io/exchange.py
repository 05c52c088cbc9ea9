"""Runs that leave a store and come back: whole and verified, or checkpoint by checkpoint in a foreign format."""

import hashlib
import math
import re
from collections.abc import Iterable

import orjson

from icl import __version__
from icl.core.backend import Tree, identical
from icl.core.errors import SpecError
from icl.core.model import parameter_shapes
from icl.core.spec import Spec
from icl.core.words import counted
from icl.io.codec import decode_spec
from icl.io.errors import CheckpointError, MissingObjectError, StoreConflictError, StoreError
from icl.io.formats import Format, decode_params, encode_params, format_of
from icl.io.names import hashed_bytes
from icl.io.rundir import KINDS, RunDir, open_run
from icl.io.store import LARGEST_DOCUMENT, Store
from icl.io.verify import verify_run
from icl.machine import allowed_memory

_FOLDERS = ("attempts", "checkpoints", "metrics", "state")  # not owner/, which is a process's, nor superseded/
_STEP_FILE = re.compile(r"step-([0-9]{1,12})(\.pt|\.npz)")


def copy_run(run: RunDir, target: Store) -> int:
    """Publish every object of an intact run under the same name in another store; returns how many there are.

    Raises: CheckpointError when the run has faults; StoreConflictError when an object there holds other bytes.
    """
    faults = list(verify_run(run))
    if faults:
        raise CheckpointError(
            f"{run.name}: got {counted(len(faults), 'fault')} ({faults[0]}); expected an intact run. Mend it first."
        )
    inside = set(run.store.list(run.name))
    paths = [f"{run.name}/{folder}/{name}" for folder in _FOLDERS for name in run.store.list(f"{run.name}/{folder}")]

    def copy(path: str) -> None:
        limit = run.size_limit(path) if path.split("/")[1] in KINDS else LARGEST_DOCUMENT
        data = run.store.read(path, limit)
        if not target.create(path, data):
            _require_same(target.read(path, len(data)) == data, f"{target.url}/{path}")

    copy(f"{run.name}/spec.json")
    list(target.map(copy, paths))
    if "complete.json" in inside:
        copy(f"{run.name}/complete.json")
        paths.append("complete.json")
    return len(paths) + 1


def export_checkpoints(run: RunDir, spec: Spec, target: Store, steps: Iterable[int] = ()) -> int:
    """Write checkpoints as `<run>/step-<updates>` in the architecture's own format, and the spec beside them.

    Args:
        steps: which; none for all.

    Returns: how many.
    """
    kind = format_of(spec)
    chosen = list(steps) or run.checkpoint_steps()
    target.create(f"{run.name}/spec.json", hashed_bytes(spec))

    def write(step: int) -> None:
        params, path = run.load_checkpoint(step), f"{run.name}/step-{step:012d}{kind.suffix}"
        if not target.create(path, encode_params(kind, spec, params)):
            present = decode_params(kind, spec, target.read(path, _size_limit(kind, spec)), f"{target.url}/{path}")
            _require_same(identical(present, params), f"{target.url}/{path}")

    list(run.store.map(write, chosen))
    return len(chosen)


def import_checkpoints(source: Store, target: Store) -> tuple[RunDir, int]:
    """Publish a folder of a `spec.json` and `step-<updates>.pt` or `.npz` files as checkpoints of that spec's run.

    Returns: the run's directory, and how many checkpoints there were.

    Raises: CheckpointError when a file is not exactly what the spec's architecture has, or holds other bits than the
        run already there; StoreError when there is nothing to import.
    """
    try:
        spec = decode_spec(source.read("spec.json"))
    except SpecError as error:
        raise SpecError(*(f"{source.url}/spec.json: {fault}" for fault in error.faults)) from None
    except MissingObjectError:
        raise StoreError(
            f"{source.url}: got no spec.json; expected the spec that the checkpoints belong to. Write it beside them."
        ) from None
    kind = format_of(spec)
    files = {
        int(match[1]): match[0]
        for match in map(_STEP_FILE.fullmatch, source.list())
        if match and match[2] == kind.suffix
    }
    if not files:
        raise StoreError(f"{source.url}: got no checkpoint; expected files such as step-100{kind.suffix}. Rename them.")
    late = [step for step in files if step > spec.training.total_steps]
    if late:
        raise StoreError(f"{source.url}: got step {late[0]}; expected at most total_steps={spec.training.total_steps}.")
    loaded = {
        step: _load(kind, spec, source, file) for step, file in files.items()
    }  # all are right before one is published
    run = open_run(target, spec)
    for step, (params, origin) in sorted(loaded.items()):
        try:
            run.save_checkpoint(step, params, {"backend": origin, "icl": __version__})
        except StoreConflictError:
            raise StoreConflictError(
                f"{source.url}/{files[step]}: got other parameters than {target.url}/{run.name} has at step {step}; "
                "expected the same, since they were imported or trained there before. What is there stays. Import into "
                "another store, or change the spec beside the files if this is another run, as by seeds.init."
            ) from None
    return run, len(loaded)


def is_run_folder(source: Store) -> bool:
    """Whether a folder is a run's own directory, as opposed to one of foreign files."""
    return {"spec.json", "checkpoints"} <= set(source.list())


def _load(kind: Format, spec: Spec, source: Store, file: str) -> tuple[Tree, str]:
    data = source.read(file, _size_limit(kind, spec))
    origin = {"name": "imported", "format": kind.name, "file": file, "sha256": hashlib.sha256(data).hexdigest()}
    params = decode_params(kind, spec, data, f"{source.url}/{file}")
    return params, orjson.dumps(origin, option=orjson.OPT_SORT_KEYS).decode()


def _size_limit(kind: Format, spec: Spec) -> int:
    """The most bytes that a checkpoint may have in a foreign format, where an optimiser's state may lie beside it."""
    masks = spec.model.num_layers * (2 * spec.task.num_examples) ** 2 if kind.name == "timaeus" else 0
    needed = 4 * (sum(map(math.prod, parameter_shapes(spec).values())) + masks)
    if needed > (allowed_memory() or needed):
        raise StoreError(
            f"spec.json: got a model of {needed} bytes; expected one that this machine has the memory for."
        )
    return 4 * needed + 2**24


def _require_same(same: bool, where: str) -> None:
    if not same:
        raise StoreConflictError(
            f"{where}: got other contents; expected those of this run. Choose another destination."
        )
