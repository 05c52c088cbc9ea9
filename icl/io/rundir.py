"""One run's directory: what lies where, and what it means.

spec.json, attempts/, checkpoints/ (parameters), state/ (what training resumes from, the newest two), metrics/,
complete.json, superseded/ (never read). Data is published before what makes it count.
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
from icl.core.spec import Spec, SpecError
from icl.io.codec import decode_spec, encode_spec
from icl.io.errors import CheckpointError, MissingObjectError, StoreError
from icl.io.names import check_run_name, run_name
from icl.io.store import Store
from icl.io.tensors import Metadata, publish, set_aside, tensors_digest, unpack

logger = logging.getLogger("icl")
_STEP_FILE = re.compile(r"step-(\d{12})\.safetensors")
_SEGMENT_FILE = re.compile(r"(\d{12})-(\d{12})-[0-9a-f]{12}\.safetensors")
_KINDS = {"checkpoints": "checkpoint", "state": "state", "metrics": "segment"}
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
        return "complete" if self.store.exists(f"{self.name}/complete.json") else "incomplete"

    def summary(self) -> RunSummary:
        """Name, status and step from two listings, without opening a file."""
        return RunSummary(self.name, self.status(), max(self.state_steps(), default=0))

    def mark_complete(self, info: Mapping[str, Any]) -> None:
        """Declare that everything the spec asks for is published."""
        self.store.create(f"{self.name}/complete.json", _json(info))

    def record_attempt(self, info: Mapping[str, Any]) -> str:
        """Add what is known at its start of one attempt to train this run to its manifest; returns the attempt's id."""
        attempt = f"{info['from_step']:012d}-{secrets.token_hex(6)}"
        self.store.create(f"{self.name}/attempts/{attempt}.json", _json(info))
        return attempt

    def record_end(self, attempt: str, info: Mapping[str, Any]) -> None:
        """Add what is known at the end of an attempt that was not cut off."""
        self.store.create(f"{self.name}/attempts/{attempt}.end.json", _json(info))

    def attempts(self) -> list[dict[str, Any]]:
        """The manifest: every attempt, in the order in which they began; one that ended has `to_step` and `status`."""
        files = {file: self._read_json(f"attempts/{file}") for file in self.store.list(f"{self.name}/attempts")}
        found = [
            info | files.get(f"{file.removesuffix('.json')}.end.json", {})
            for file, info in files.items()
            if not file.endswith(".end.json")
        ]
        return sorted(found, key=lambda attempt: str(attempt.get("started")))

    def checkpoint_steps(self) -> list[int]:
        """The steps whose parameters are published, ascending by number."""
        return self._steps("checkpoints")

    def state_steps(self) -> list[int]:
        """The steps from which training can resume, ascending."""
        return self._steps("state")

    def save_checkpoint(self, step: int, params: Tree, metadata: Metadata) -> None:
        """Publish the parameters after `step` updates."""
        self._publish("checkpoints", step, params, metadata)

    def load_checkpoint(self, step: int) -> Tree:
        """The parameters after `step` updates. Raises CheckpointError when they are missing or damaged."""
        path = self._step_path("checkpoints", step)
        if not self.store.exists(path):
            saved = ", ".join(map(str, self.checkpoint_steps())) or "none"
            raise CheckpointError(
                f"{path}: got no checkpoint; expected one of the saved steps ({saved}). Choose one of them."
            )
        return self._load("checkpoints", path)[0]

    def save_state(self, step: int, state: Tree, metadata: Metadata) -> None:
        """Publish the state to resume from at `step`, then remove those older than the newest two that are intact."""
        self._publish("state", step, state, metadata)
        intact = 0
        for saved in reversed(self.state_steps()):
            if intact == _KEPT_STATES:
                self.store.delete(self._step_path("state", saved))
            elif saved == step or self._is_intact("state", saved):
                intact += 1

    def newest_state(self) -> tuple[int, Tree, Metadata] | None:
        """The newest intact state; a damaged newer one is reported and passed over."""
        steps = self.state_steps()
        while steps:
            step = steps.pop()
            try:
                state, metadata = self._load("state", self._step_path("state", step))
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
        for path, start, _ in self._segments():
            for step, name, value in self._segment_values(path, start):
                before = rows.setdefault(step, {}).setdefault(name, value)
                if before.hex() != value.hex():  # so that NaN agrees with NaN, and 0.0 does not with -0.0
                    others = [other for other, low, high in self._segments() if low <= step <= high and other != path]
                    raise CheckpointError(
                        f"{path}: got {name} = {value!r} at step {step}; expected {before!r} as in "
                        f"{', '.join(others)}. Two writers computed different bits; move one of the files away."
                    )
        return dict(sorted(rows.items()))

    def set_aside_beyond(self, step: int) -> None:
        """Put everything that goes beyond `step` under superseded/: the run goes on from there with other bits."""
        for folder in ("checkpoints", "state"):
            for later in self._steps(folder):
                if later > step:
                    set_aside(self.store, self._step_path(folder, later))
        for path, _, stop in self._segments():
            if stop > step:
                set_aside(self.store, path)

    def verify(self) -> Iterator[str]:
        """Every fault of what is saved, naming the file: digests, gaps, strays and contradictions."""
        try:
            spec: Spec | None = _stored_spec(self.store, self.name)
        except CheckpointError as error:
            spec = None
            yield str(error)
        known = {"spec.json", "attempts", "checkpoints", "state", "metrics", "complete.json", "superseded"}
        for stray in sorted(set(self.store.list(self.name)) - known):
            yield f"{self.name}/{stray}: got a stray object; expected one of {', '.join(sorted(known))}."
        damaged = False
        for folder in _KINDS:
            for file in self.store.list(f"{self.name}/{folder}"):
                path = f"{self.name}/{folder}/{file}"
                try:
                    self._load(folder, path)
                except (CheckpointError, StoreError) as error:
                    if folder == "state" and isinstance(error, MissingObjectError):
                        continue  # the run goes on meanwhile, and has removed an old state
                    damaged = True
                    yield str(error)
        documents = [f"attempts/{name}" for name in self.store.list(f"{self.name}/attempts")]
        for document in [*documents, *(["complete.json"] if self.status() == "complete" else [])]:
            try:
                self._read_json(document)
            except CheckpointError as error:
                yield str(error)
        if damaged:
            return
        yield from self._verify_completeness(spec)

    def _verify_completeness(self, spec: Spec | None) -> Iterator[str]:
        try:
            self.metrics()
        except CheckpointError as error:
            yield str(error)
        if self.status() == "complete" and spec is not None:
            total = spec.training.total_steps
            for folder, step in (("checkpoints", 0), ("checkpoints", total), ("state", total)):
                if step not in self._steps(folder):
                    yield f"{self._step_path(folder, step)}: got nothing; expected it in a complete run."
            if self._read_json("complete.json").get("step") != total:
                yield f"{self.name}/complete.json: got another step; expected total_steps={total}."
        covered = 0
        for _, start, stop in self._segments():
            if start <= covered:
                covered = max(covered, stop)
        if covered < max(self.state_steps(), default=0):
            yield f"{self.name}/metrics: got no segment from step {covered}; expected metrics up to the newest state."

    def _steps(self, folder: str) -> list[int]:
        matches = map(_STEP_FILE.fullmatch, self.store.list(f"{self.name}/{folder}"))
        return sorted(int(match[1]) for match in matches if match)

    def _step_path(self, folder: str, step: int) -> str:
        return f"{self.name}/{folder}/step-{step:012d}.safetensors"

    def _segments(self) -> list[tuple[str, int, int]]:
        names = self.store.list(f"{self.name}/metrics")
        matches = [match for match in map(_SEGMENT_FILE.fullmatch, names) if match]
        return [(f"{self.name}/metrics/{match[0]}", int(match[1]), int(match[2])) for match in matches]

    def _segment_values(self, path: str, start: int) -> Iterator[tuple[int, str, float]]:
        tensors, metadata = self._load("metrics", path)
        for index, loss in enumerate(tensors[TRAINING_LOSS].tolist()):
            yield start + index + 1, TRAINING_LOSS, loss
        names = orjson.loads(metadata["names"])
        for step, values in zip(tensors["steps"].tolist(), tensors["values"].tolist(), strict=True):
            for name, value in zip(names, values, strict=True):
                yield step, name, value

    def _is_intact(self, folder: str, step: int) -> bool:
        try:
            self._load(folder, self._step_path(folder, step))
        except (CheckpointError, MissingObjectError):  # or another writer has just removed it
            return False
        return True

    def _publish(self, folder: str, step: int, tensors: Tree, metadata: Metadata) -> None:
        described = metadata | {"kind": _KINDS[folder], "run": self.name, "step": str(step)}
        publish(self.store, self._step_path(folder, step), tensors, described)

    def _load(self, folder: str, path: str) -> tuple[Tree, Metadata]:
        """An intact file that is what its name and place say."""
        tensors, metadata = unpack(self.store.read(path), path)
        said = (metadata.get("kind"), metadata.get("run"))
        if folder == "metrics":
            start, stop = int(metadata.get("start", -1)), int(metadata.get("stop", -1))
            place = f"{start:012d}-{stop:012d}-{metadata['tensors_sha256'][:12]}.safetensors"
        else:
            place = f"step-{int(metadata.get('step', -1)):012d}.safetensors"
        if said != (_KINDS[folder], self.name) or not path.endswith(f"/{place}"):
            raise CheckpointError(
                f"{path}: got the {said[0]} {place} of run {said[1]}; expected what its name and folder say. "
                "The file was moved or renamed; put it back."
            )
        return tensors, metadata

    def _read_json(self, inside: str) -> dict[str, Any]:
        path = f"{self.name}/{inside}"
        try:
            data = orjson.loads(self.store.read(path))
        except orjson.JSONDecodeError as error:
            raise CheckpointError(
                f"{path}: got text that is not JSON ({error}); expected what was written. It is damaged."
            ) from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{path}: got {type(data).__name__}; expected an object. It is damaged.")
        return data


def open_run(store: Store, spec: Spec) -> RunDir:
    """The directory of the run of `spec`, made if it is not there.

    Raises: CheckpointError when the directory of that name holds another experiment.
    """
    name = run_name(spec)
    if not store.create(f"{name}/spec.json", encode_spec(spec)):
        _stored_spec(store, name)
    for folder in ("", "/attempts", "/checkpoints", "/state", "/metrics"):
        store.discard_leftovers(f"{name}{folder}")
    return RunDir(store, name)


def read_run(store: Store, name: str) -> tuple[RunDir, Spec]:
    """The directory and spec of a run that is already there. Raises StoreError or CheckpointError."""
    check_run_name(name)
    if not store.exists(f"{name}/spec.json"):
        names = ", ".join(summary.name for summary in list_runs(store)) or "none"
        raise StoreError(f"{store.url}: got no run {name!r}; expected one of those there ({names}).")
    return RunDir(store, name), _stored_spec(store, name)


def list_runs(store: Store) -> list[RunSummary]:
    """Every run of a store, by name."""
    return [RunDir(store, name).summary() for name in store.list() if store.exists(f"{name}/spec.json")]


def _stored_spec(store: Store, name: str) -> Spec:
    path = f"{name}/spec.json"
    try:
        spec = decode_spec(store.read(path))
    except SpecError as error:
        raise CheckpointError(
            f"{path}: got {error}; expected the spec of this run. It is damaged or foreign."
        ) from None
    if run_name(spec) != name:
        raise CheckpointError(
            f"{path}: got the spec of {run_name(spec)}; expected that of {name}. The data is foreign."
        )
    return spec


def _json(info: Mapping[str, Any]) -> bytes:
    return orjson.dumps(dict(info), option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)
