"""One run's directory: what lies where, and what it means.

spec.json (the experiment), attempts/ (with their run half), checkpoints/ (parameters), state/ (what training resumes
from, the newest two), metrics/, complete.json, owner/ (a heartbeat), superseded/ (never read). Data is published before
what makes it count.
"""

import logging
import re
from collections.abc import Iterator
from functools import partial

import attrs
import orjson
import torch

from icl.core.backend import Tree
from icl.core.metrics import TRAINING_LOSS
from icl.core.model import parameter_shapes
from icl.core.rules import MAX_INT
from icl.core.spec import Experiment, Spec
from icl.core.step import state_leaves
from icl.io.contents import require_contents, size_limit
from icl.io.errors import CheckpointError, MissingObjectError
from icl.io.manifest import Manifest, read_spec, saved_steps, step_path, stored_experiment
from icl.io.names import hashed_bytes, run_name
from icl.io.reading import read_decoded
from icl.io.records import SegmentFile, StepFile, structure
from icl.io.store import Store
from icl.io.tensors import Metadata, publish, set_aside, tensors_digest, unpack

logger = logging.getLogger("icl")
_SEGMENT_FILE = re.compile(r"([0-9]{12})-([0-9]{12})-[0-9a-f]{12}\.safetensors")
KINDS = {"checkpoints": "checkpoint", "state": "state", "metrics": "segment"}
_KEPT_STATES = 2
Rows = dict[int, dict[str, float]]


@attrs.frozen
class RunDir:
    """The directory of one run in a store.

    Attributes:
        experiment: what its tensors are checked against; None where it cannot be read.
    """

    store: Store
    name: str
    experiment: Experiment | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def manifest(self) -> Manifest:
        """What is told of this run."""
        return Manifest(self.store, self.name)

    def checkpoint_steps(self) -> list[int]:
        """The steps whose parameters are published, ascending by number."""
        return saved_steps(self.store, self.name, "checkpoints")

    def state_steps(self) -> list[int]:
        """The steps from which training can resume, ascending."""
        return saved_steps(self.store, self.name, "state")

    def save_checkpoint(self, step: int, params: Tree, metadata: Metadata) -> None:
        """Publish the parameters after `step` updates."""
        self._publish("checkpoints", step, params, metadata)

    def load_checkpoint(self, step: int) -> Tree:
        """The parameters after `step` updates, in the order of `parameter_shapes`.

        Raises: CheckpointError when they are missing, damaged or foreign.
        """
        path = self.step_path("checkpoints", step)
        try:
            params = self.load("checkpoints", path)[0]
            return (
                params
                if self.experiment is None
                else {name: params[name] for name in parameter_shapes(self.experiment)}
            )
        except MissingObjectError:
            saved = self.checkpoint_steps()
        shown = ", ".join(map(str, saved if len(saved) <= 20 else [*saved[:10], "...", *saved[-10:]])) or "none"
        raise CheckpointError(
            f"{path}: got no checkpoint; expected one of the saved steps ({shown}). Choose one of them."
        )

    def save_state(self, step: int, state: Tree, metadata: Metadata) -> None:
        """Publish the state to resume from at `step`, then remove old ones."""
        self.publish_state(step, state, metadata)
        self.remove_old_states(step)

    def publish_state(self, step: int, state: Tree, metadata: Metadata) -> None:
        """Publish a state that training can go on from at `step`."""
        self._publish("state", step, state, metadata)

    def remove_old_states(self, intact_at: int | None = None) -> None:
        """Remove the states older than the newest two that are intact; where nothing may be removed they stay.

        Args:
            intact_at: the step of one that is known to be intact.
        """
        intact = 0
        for saved in reversed(self.state_steps()):
            if intact == _KEPT_STATES:
                self.store.discard(self.step_path("state", saved))
            elif saved == intact_at or self._is_intact("state", saved):
                intact += 1

    def newest_state(self, at_most: int = MAX_INT) -> tuple[int, Tree, Metadata] | None:
        """The newest intact state, up to a step; a damaged or foreign newer one is reported and passed over."""
        steps, tried = [step for step in self.state_steps() if step <= at_most], set[int]()
        while steps:
            step = steps.pop()
            tried.add(step)
            try:
                state, metadata = self.load("state", self.step_path("state", step))
            except MissingObjectError:  # another process has since published newer ones and removed this one
                steps = [other for other in self.state_steps() if other <= at_most and other not in tried]
            except CheckpointError as error:
                logger.warning("%s Falling back to the state before it.", error)
            else:
                # As at step 0: the inputs of a program are in the order of its leaves.
                leaves = sorted(state) if self.experiment is None else state_leaves(self.experiment)
                return step, {leaf: state[leaf] for leaf in leaves}, metadata
        return None

    def save_segment(self, start: int, stop: int, losses: torch.Tensor, rows: Rows, metadata: Metadata) -> None:
        """Publish the metrics of updates start+1..stop: losses (stop - start,) and evaluation rows by step.

        The loss of update s, on its batch before the update, belongs to row s; an evaluation of s updates to row s too.
        """
        if len(losses) != stop - start:
            raise AssertionError(f"{len(losses)} losses for updates {start + 1}..{stop}")
        names, steps = sorted({name for row in rows.values() for name in row}), sorted(rows)
        tensors = {
            TRAINING_LOSS: losses,
            "steps": torch.tensor(steps, dtype=torch.int64),
            "values": torch.tensor([[rows[at].get(name, 0.0) for name in names] for at in steps], dtype=torch.float64),
        }
        measured = torch.tensor([[name in rows[step] for name in names] for step in steps], dtype=torch.bool)
        if not measured.all():  # some are rarer than others
            tensors["measured"] = measured
        described = metadata | {
            "kind": "segment",
            "run": self.name,
            "start": str(start),
            "stop": str(stop),
            "names": orjson.dumps(names).decode(),
        }
        file = f"{start:012d}-{stop:012d}-{tensors_digest(tensors)[:12]}.safetensors"
        publish(self.store, f"{self.name}/metrics/{file}", tensors, described, partial(self._decode, "metrics"))

    def metrics(self) -> Rows:
        """Every metric by step, each step once, whatever interruptions made segments overlap.

        Raises: CheckpointError when a segment is damaged or two of them disagree.
        """
        rows: Rows = {}
        segments = self.segments()
        for (path, start, _), loaded in zip(segments, self.store.map(self._load_segment, segments), strict=True):
            for step, name, value in _segment_values(start, *loaded):
                before = rows.setdefault(step, {}).setdefault(name, value)
                if before.hex() != value.hex():  # so that NaN agrees with NaN, and 0.0 does not with -0.0
                    others = [other for other, low, high in segments if low <= step <= high and other != path]
                    raise CheckpointError(
                        f"{path}: got {name} = {value!r} at step {step}; expected {before!r} as in "
                        f"{', '.join(others)}. Two writers computed different bits; move one of the files away."
                    )
        return dict(sorted(rows.items()))

    def set_aside_beyond(self, step: int) -> None:
        """Put everything that goes beyond `step` under superseded/: the run goes on from there with other bits."""
        for _, path in self.files_beyond(step):
            try:
                set_aside(self.store, path, self.store.read(path, self.size_limit(path)))
            except CheckpointError:
                set_aside(self.store, path)

    def files_beyond(self, step: int) -> list[tuple[str, str]]:
        """Folder and path of every file of tensors that goes beyond `step`."""
        later = [
            (folder, self.step_path(folder, at))
            for folder in ("checkpoints", "state")
            for at in saved_steps(self.store, self.name, folder)
            if at > step
        ]
        return later + [("metrics", path) for path, _, stop in self.segments() if stop > step]

    def step_path(self, folder: str, step: int) -> str:
        return step_path(self.name, folder, step)

    def segments(self) -> list[tuple[str, int, int]]:
        names = self.store.list(f"{self.name}/metrics")
        matches = [match for match in map(_SEGMENT_FILE.fullmatch, names) if match]
        return [(f"{self.name}/metrics/{match[0]}", int(match[1]), int(match[2])) for match in matches]

    def covered_steps(self) -> int:
        """Up to which step there are metrics of every update, from the names of the segments alone."""
        covered = 0
        for _, start, stop in self.segments():
            if start <= covered:
                covered = max(covered, stop)
        return covered

    def _load_segment(self, segment: tuple[str, int, int]) -> tuple[Tree, Metadata]:
        return self.load("metrics", segment[0])

    def _is_intact(self, folder: str, step: int) -> bool:
        try:
            self.load(folder, self.step_path(folder, step))
        except (CheckpointError, MissingObjectError):  # or another writer has just removed it
            return False
        return True

    def _publish(self, folder: str, step: int, tensors: Tree, metadata: Metadata) -> None:
        described = metadata | {"kind": KINDS[folder], "run": self.name, "step": str(step)}
        publish(self.store, self.step_path(folder, step), tensors, described, partial(self._decode, folder))

    def load(self, folder: str, path: str) -> tuple[Tree, Metadata]:
        """An intact file that is what its name and place say and holds what the spec asks for.

        Raises: CheckpointError naming the file and what does not fit; MissingObjectError.
        """
        return read_decoded(self.store, path, partial(self._decode, folder), self.size_limit(path))

    def size_limit(self, path: str) -> int:
        """The most bytes that the file of tensors at `path` may have."""
        _, folder, file = path.split("/")
        segment = _SEGMENT_FILE.fullmatch(file)
        most = self.experiment.training.total_steps if self.experiment else 0
        num_updates = min(max(int(segment[2]) - int(segment[1]), 0), most) if segment else 0
        return size_limit(self.experiment, KINDS[folder], num_updates)

    def _decode(self, folder: str, data: bytes, path: str) -> tuple[Tree, Metadata]:
        tensors, metadata = unpack(data, path)
        record: type[StepFile | SegmentFile] = SegmentFile if folder == "metrics" else StepFile
        said = structure(record, metadata, path)
        if (said.kind, said.run) != (KINDS[folder], self.name) or not path.endswith(f"/{said.file}"):
            raise CheckpointError(
                f"{path}: got the {said.kind} {said.file} of run {said.run}; expected what its name and folder say. "
                "The file was moved or renamed; put it back."
            )
        require_contents(self.experiment, said, tensors, path)
        return tensors, metadata


def open_run(store: Store, experiment: Experiment) -> RunDir:
    """The directory of the run of `experiment`, made if it is not there.

    Raises: CheckpointError when the directory of that name holds another experiment.
    """
    name = run_name(experiment)
    if not store.create(f"{name}/spec.json", hashed_bytes(experiment)):
        stored_experiment(store, name)
    for folder in ("", "/attempts", "/checkpoints", "/state", "/metrics", "/owner"):
        store.discard_leftovers(f"{name}{folder}")
    return RunDir(store, name, experiment)


def read_run(store: Store, name: str) -> tuple[RunDir, Spec]:
    """The directory of a run that is already there, and its spec as `read_spec` gives it."""
    spec = read_spec(store, name)
    return RunDir(store, name, spec), spec


def _segment_values(start: int, tensors: Tree, metadata: Metadata) -> Iterator[tuple[int, str, float]]:
    for index, loss in enumerate(tensors[TRAINING_LOSS].tolist()):
        yield start + index + 1, TRAINING_LOSS, loss
    names = orjson.loads(metadata["names"])
    values = tensors["values"]
    measured = tensors.get("measured", torch.ones_like(values, dtype=torch.bool))
    for step, row, has in zip(tensors["steps"].tolist(), values.tolist(), measured.tolist(), strict=True):
        yield from ((step, name, value) for name, value, there in zip(names, row, has, strict=True) if there)
