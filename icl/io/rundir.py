"""One run's directory: what lies where, and what it means.

spec.json (the what-half), attempts/ (with their run half), checkpoints/ (parameters), state/ (what training resumes
from, the newest two), metrics/, complete.json, owner/ (a heartbeat), superseded/ (never read). Data is published before
what makes it count.
"""

import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import orjson
import torch

from icl.core.backend import Tree
from icl.core.metrics import TRAINING_LOSS
from icl.core.spec import RunSpec, Spec, SpecError
from icl.io.codec import decode_spec, encode_spec, spec_from_data, spec_to_data
from icl.io.documents import decode_document, encode_document
from icl.io.errors import CheckpointError, MissingObjectError, StoreError
from icl.io.names import check_run_name, run_name
from icl.io.store import Store
from icl.io.tensors import Metadata, publish, set_aside, tensors_digest, unpack

logger = logging.getLogger("icl")
_STEP_FILE = re.compile(r"step-(\d{12})\.safetensors")
_SEGMENT_FILE = re.compile(r"(\d{12})-(\d{12})-[0-9a-f]{12}\.safetensors")
KINDS = {"checkpoints": "checkpoint", "state": "state", "metrics": "segment"}
_KEPT_STATES = 2
Rows = dict[int, dict[str, float]]


@attrs.frozen
class RunSummary:
    """A run as a listing shows it: `step` is the newest one it can be resumed from."""

    name: str
    status: str
    step: int


@attrs.frozen
class RunDir:
    """The directory of one run in a store."""

    store: Store
    name: str

    def status(self) -> str:
        """ "complete" or "incomplete"."""
        try:
            self.store.read(f"{self.name}/complete.json")
        except MissingObjectError:
            return "incomplete"
        return "complete"

    def mark_complete(self, info: Mapping[str, Any]) -> None:
        """Declare that everything the spec asks for is published."""
        self.store.create(f"{self.name}/complete.json", encode_document(info))

    def record_attempt(self, info: Mapping[str, Any]) -> str:
        """Add what is known at its start of one attempt to train this run to its manifest; returns the attempt's id."""
        attempt = f"{info['from_step']:012d}-{secrets.token_hex(6)}"
        self.store.create(f"{self.name}/attempts/{attempt}.json", encode_document(info))
        return attempt

    def record_end(self, attempt: str, info: Mapping[str, Any]) -> None:
        """Add what is known at the end of an attempt that was not cut off."""
        self.store.create(f"{self.name}/attempts/{attempt}.end.json", encode_document(info))

    def attempts(self) -> list[dict[str, Any]]:
        """The manifest: every attempt, in the order in which they began; one that ended has `to_step` and `status`."""
        return self._read_attempts(self.store.list(f"{self.name}/attempts"))

    def last_error(self) -> str | None:
        """Why the latest attempt failed, if it did; one that was cut off did not. Reads few files."""
        names = self.store.list(f"{self.name}/attempts")
        newest = max((name.partition("-")[0] for name in names), default="")
        attempts = self._read_attempts([name for name in names if name.startswith(f"{newest}-")])
        return str(attempts[-1]["error"]) if attempts and attempts[-1].get("status") == "failed" else None

    def _read_attempts(self, names: list[str]) -> list[dict[str, Any]]:
        paths = [f"{self.name}/attempts/{name}" for name in names]
        files = dict(zip(names, self.store.map(self._read_document, paths), strict=True))
        found = [
            info | files.get(f"{file.removesuffix('.json')}.end.json", {})
            for file, info in files.items()
            if not file.endswith(".end.json")
        ]
        return sorted(found, key=lambda attempt: (int(attempt["from_step"]), str(attempt["started"])))

    def checkpoint_steps(self) -> list[int]:
        """The steps whose parameters are published, ascending by number."""
        return self.steps_in("checkpoints")

    def state_steps(self) -> list[int]:
        """The steps from which training can resume, ascending."""
        return self.steps_in("state")

    def save_checkpoint(self, step: int, params: Tree, metadata: Metadata) -> None:
        """Publish the parameters after `step` updates."""
        self._publish("checkpoints", step, params, metadata)

    def load_checkpoint(self, step: int) -> Tree:
        """The parameters after `step` updates. Raises CheckpointError when they are missing or damaged."""
        path = self.step_path("checkpoints", step)
        try:
            return self.load("checkpoints", path)[0]
        except MissingObjectError:
            saved = self.checkpoint_steps()
        shown = ", ".join(map(str, saved if len(saved) <= 20 else [*saved[:10], "...", *saved[-10:]])) or "none"
        raise CheckpointError(
            f"{path}: got no checkpoint; expected one of the saved steps ({shown}). Choose one of them."
        )

    def save_state(self, step: int, state: Tree, metadata: Metadata) -> None:
        """Publish the state to resume from at `step`, then remove those older than the newest two that are intact."""
        self._publish("state", step, state, metadata)
        intact = 0
        for saved in reversed(self.state_steps()):
            if intact == _KEPT_STATES:
                self.store.delete(self.step_path("state", saved))
            elif saved == step or self._is_intact("state", saved):
                intact += 1

    def newest_state(self) -> tuple[int, Tree, Metadata] | None:
        """The newest intact state; a damaged newer one is reported and passed over."""
        steps = self.state_steps()
        while steps:
            step = steps.pop()
            try:
                state, metadata = self.load("state", self.step_path("state", step))
            except MissingObjectError:  # another process has since published newer ones and removed this one
                steps = self.state_steps()
            except CheckpointError as error:
                logger.warning("%s Falling back to the state before it.", error)
            else:
                return step, state, metadata
        return None

    def save_segment(self, start: int, stop: int, losses: torch.Tensor, rows: Rows, metadata: Metadata) -> None:
        """Publish the metrics of updates start+1..stop: losses (stop - start,) and evaluation rows by step.

        The loss of update s, on its batch before the update, belongs to row s; an evaluation of s updates to row s too.
        """
        if len(losses) != stop - start:
            raise AssertionError(f"{len(losses)} losses for updates {start + 1}..{stop}")
        names = sorted({name for row in rows.values() for name in row})
        tensors = {
            TRAINING_LOSS: losses,
            "steps": torch.tensor(sorted(rows), dtype=torch.int64),
            "values": torch.tensor(
                [[rows[step][name] for name in names] for step in sorted(rows)], dtype=torch.float64
            ),
        }
        described = metadata | {
            "kind": "segment",
            "run": self.name,
            "start": str(start),
            "stop": str(stop),
            "names": orjson.dumps(names).decode(),
        }
        file = f"{start:012d}-{stop:012d}-{tensors_digest(tensors)[:12]}.safetensors"
        publish(self.store, f"{self.name}/metrics/{file}", tensors, described)

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
        later = [
            self.step_path(folder, at)
            for folder in ("checkpoints", "state")
            for at in self.steps_in(folder)
            if at > step
        ]
        for path in [*later, *(path for path, _, stop in self.segments() if stop > step)]:
            set_aside(self.store, path, self.store.read(path))

    def _read_document(self, path: str) -> dict[str, Any]:
        return decode_document(self.store.read(path), path)

    def steps_in(self, folder: str) -> list[int]:
        matches = map(_STEP_FILE.fullmatch, self.store.list(f"{self.name}/{folder}"))
        return sorted(int(match[1]) for match in matches if match)

    def step_path(self, folder: str, step: int) -> str:
        return f"{self.name}/{folder}/step-{step:012d}.safetensors"

    def segments(self) -> list[tuple[str, int, int]]:
        names = self.store.list(f"{self.name}/metrics")
        matches = [match for match in map(_SEGMENT_FILE.fullmatch, names) if match]
        return [(f"{self.name}/metrics/{match[0]}", int(match[1]), int(match[2])) for match in matches]

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
        publish(self.store, self.step_path(folder, step), tensors, described)

    def load(self, folder: str, path: str) -> tuple[Tree, Metadata]:
        """An intact file that is what its name and place say."""
        tensors, metadata = unpack(self.store.read(path), path)
        said = (metadata.get("kind"), metadata.get("run"))
        if folder == "metrics":
            start, stop = int(metadata.get("start", -1)), int(metadata.get("stop", -1))
            place = f"{start:012d}-{stop:012d}-{metadata['tensors_sha256'][:12]}.safetensors"
        else:
            place = f"step-{int(metadata.get('step', -1)):012d}.safetensors"
        if said != (KINDS[folder], self.name) or not path.endswith(f"/{place}"):
            raise CheckpointError(
                f"{path}: got the {said[0]} {place} of run {said[1]}; expected what its name and folder say. "
                "The file was moved or renamed; put it back."
            )
        return tensors, metadata


def open_run(store: Store, spec: Spec) -> RunDir:
    """The directory of the run of `spec`, made if it is not there.

    Raises: CheckpointError when the directory of that name holds another experiment.
    """
    name = run_name(spec)
    if not store.create(f"{name}/spec.json", encode_spec(spec, what_only=True)):
        stored_spec(store, name)
    for folder in ("", "/attempts", "/checkpoints", "/state", "/metrics", "/owner"):
        store.discard_leftovers(f"{name}{folder}")
    return RunDir(store, name)


def read_run(store: Store, name: str) -> tuple[RunDir, Spec]:
    """The directory of a run that is already there, and its spec, with the run half of its latest attempt.

    Raises: StoreError when it is not there; CheckpointError when what is there is not the run.
    """
    check_run_name(name)
    run = RunDir(store, name)
    try:
        spec = stored_spec(store, name)
    except MissingObjectError:
        names = ", ".join(summary.name for summary in list_runs(store)) or "none"
        raise StoreError(f"{store.url}: got no run {name!r}; expected one of those there ({names}).") from None
    attempts = run.attempts()
    if attempts:
        spec = spec_from_data({**spec_to_data(spec), "run": attempts[-1].get("run", {})})
    return run, spec


def list_runs(store: Store) -> list[RunSummary]:
    """Every run of a store, by name, from two listings each and without opening a file."""

    def summary(name: str) -> RunSummary | None:
        inside = store.list(name)
        if "spec.json" not in inside:
            return None
        status = "complete" if "complete.json" in inside else "incomplete"
        return RunSummary(name, status, max(RunDir(store, name).state_steps(), default=0))

    return [found for found in store.map(summary, store.list()) if found]


def stored_spec(store: Store, name: str) -> Spec:
    """The experiment that a run's directory holds, with the default run half.

    Raises: CheckpointError unless it is, to the last bit, the one that its name says.
    """
    path = f"{name}/spec.json"
    try:
        spec = attrs.evolve(decode_spec(store.read(path)), run=RunSpec())
    except SpecError as error:
        raise CheckpointError(
            f"{path}: got {error}; expected the spec of this run. It is damaged or foreign."
        ) from None
    if run_name(spec) != name:
        raise CheckpointError(
            f"{path}: got the spec of {run_name(spec)}; expected that of {name}. The data is foreign."
        )
    return spec


def _segment_values(start: int, tensors: Tree, metadata: Metadata) -> Iterator[tuple[int, str, float]]:
    for index, loss in enumerate(tensors[TRAINING_LOSS].tolist()):
        yield start + index + 1, TRAINING_LOSS, loss
    names = orjson.loads(metadata["names"])
    for step, values in zip(tensors["steps"].tolist(), tensors["values"].tolist(), strict=True):
        for name, value in zip(names, values, strict=True):
            yield step, name, value
