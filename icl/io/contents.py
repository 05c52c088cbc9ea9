"""What the tensor files of a run hold: names, shapes, dtypes and sizes, as its spec asks for them."""

import math

import torch

from icl.core.backend import Tree
from icl.core.measurements import standard_measurements
from icl.core.metrics import TRAINING_LOSS
from icl.core.model import parameter_shapes
from icl.core.spec import Experiment
from icl.core.tasks import EVALUATION_SETS
from icl.io.errors import CheckpointError
from icl.io.records import SegmentFile, StepFile
from icl.machine import allowed_memory

_SLACK = 2**20  # bytes of a header beside its tensors
_ENTRY = 512  # bytes of one tensor's entry in it
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def size_limit(experiment: Experiment | None, kind: str, num_updates: int = 0) -> int:
    """The most bytes that a file of that kind may have; without a spec, what this machine has the memory for.

    Args:
        kind: "checkpoint", "state" or "segment". num_updates: those of the segment.
    """
    memory = allowed_memory() or 2**40
    if experiment is None:
        return memory // 4
    if kind == "segment":
        metrics = (
            len(EVALUATION_SETS) * len(standard_measurements(experiment.task)) * (experiment.task.num_examples + 1)
        )
        # Twice what this version measures, since a later one may measure more.
        num_bytes = 4 * num_updates + 8 * (num_updates + 1) * (1 + 2 * metrics) + 2 * metrics * _ENTRY
        return min(memory, num_bytes + _SLACK)
    shapes = parameter_shapes(experiment).values()
    copies = 1 + len(experiment.training.optimizer.leaves) if kind == "state" else 1
    return min(memory, sum(4 * copies * math.prod(shape) + _ENTRY for shape in shapes) + _SLACK)


def require_contents(experiment: Experiment | None, said: StepFile | SegmentFile, tensors: Tree, where: str) -> None:
    """Raise CheckpointError, naming `where` and what does not fit, unless a file holds what the run's spec asks for."""
    found: Layout = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    expected = _layout(experiment, said, found)
    faults = [
        f"{name} {_words(found.get(name))} for {_words(expected.get(name))}"
        for name in sorted({*found, *expected})
        if found.get(name) != expected.get(name)
    ]
    last = said.stop if isinstance(said, SegmentFile) else said.step
    if experiment is not None and last > experiment.training.total_steps:
        faults.append(f"step {last} of {experiment.training.total_steps}")
    if not faults:
        faults = _wrong_steps(experiment, said, tensors)
    if faults:
        shown = f"{', '.join(faults[:8])}{' and more' if len(faults) > 8 else ''}"
        raise CheckpointError(f"{where}: got {shown}; expected what the spec asks for. It is foreign.")


def _layout(experiment: Experiment | None, said: StepFile | SegmentFile, found: Layout) -> Layout:
    if isinstance(said, SegmentFile):
        num_rows = (found.get("steps", (None, ()))[1] or (0,))[0]
        num_names = len(said.names)
        # Without rows the values have one axis or two.
        values = (0,) if num_rows == 0 and found.get("values", (None, ()))[1] == (0,) else (num_rows, num_names)
        rarer = {"measured": (torch.bool, values)} if "measured" in found else {}
        return {
            **rarer,
            TRAINING_LOSS: (torch.float32, (said.stop - said.start,)),
            "steps": (torch.int64, (num_rows,)),
            "values": (torch.float64, values),
        }
    if experiment is None:
        return found
    shapes = parameter_shapes(experiment)
    if said.kind == "checkpoint":
        return {name: (torch.float32, shape) for name, shape in shapes.items()}
    size = sum(map(math.prod, shapes.values()))
    vectors = ("params", *experiment.training.optimizer.leaves)
    return {"step": (torch.int64, ()), **dict.fromkeys(vectors, (torch.float32, (size,)))}


def _wrong_steps(experiment: Experiment | None, said: StepFile | SegmentFile, tensors: Tree) -> list[str]:
    if isinstance(said, SegmentFile):
        steps = tensors["steps"]
        inside = bool(((steps >= said.start) & (steps <= said.stop)).all())
        return [] if inside and bool((steps.diff() > 0).all()) else ["steps out of order or out of its updates"]
    if experiment is not None and said.kind == "state" and int(tensors["step"]) != said.step:
        return [f"the state after {int(tensors['step'])} updates"]
    return []


def _words(entry: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "nothing" if entry is None else f"{str(entry[0]).removeprefix('torch.')} {entry[1]}"
