"""What is told of a run in JSON: its spec, every attempt to train it, whether it is complete. Reads no tensors.

A listing of a store, or of a sweep, is made of these and of file names; none of it needs torch.
"""

import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from icl.core.errors import SpecError
from icl.core.spec import Experiment, RunSpec, Spec
from icl.io.codec import decode_spec, spec_from_data, spec_to_data
from icl.io.documents import decode_document, encode_document
from icl.io.errors import CheckpointError, MissingObjectError, StoreError
from icl.io.names import check_run_name, is_run_name, natural_order, run_name
from icl.io.reading import read_decoded
from icl.io.records import Attempt, AttemptEnd, Complete, structure
from icl.io.store import Store

logger = logging.getLogger("icl")
_STEP_FILE = re.compile(r"step-([0-9]{12})\.safetensors")
# The number is how many attempts were there before; those of 0.1.0 have none.
_ATTEMPT_FILE = re.compile(r"(?P<from_step>[0-9]{12})-(?:(?P<number>[0-9]{6,9})-)?[0-9a-f]{12}(?P<end>\.end)?\.json")
RUN_OBJECTS = {"spec.json", "attempts", "checkpoints", "state", "metrics", "complete.json", "owner", "superseded"}
_LARGEST_SPEC = 2**16  # bytes


@attrs.frozen
class RunSummary:
    """A run as a listing shows it: `step` is the newest one it can be resumed from, or else whose parameters it has."""

    name: str
    status: str
    step: int


@attrs.frozen
class Manifest:
    """The attempts to train one run of a store, and whether one has completed it."""

    store: Store
    name: str

    def status(self) -> str:
        """ "complete" or "incomplete"; also incomplete when what says otherwise is damaged, which is then said."""
        try:
            self.completion()
        except MissingObjectError:
            return "incomplete"
        except CheckpointError as error:
            logger.warning("%s It does not say that the run is complete.", error)
            return "incomplete"
        return "complete"

    def completion(self) -> Complete:
        """What says that the run is complete.

        Raises: MissingObjectError when nothing does; CheckpointError when it is damaged or foreign.
        """
        return read_decoded(
            self.store,
            f"{self.name}/complete.json",
            lambda data, where: structure(Complete, decode_document(data, where), where),
        )

    def mark_complete(self, info: Mapping[str, Any]) -> None:
        """Declare that everything the spec asks for is published; what is there and damaged is put aside."""
        path = f"{self.name}/complete.json"
        while not self.store.create(path, encode_document(info)) and self.status() != "complete":
            self.store.move(path, f"{self.name}/superseded/{secrets.token_hex(6)}-complete.json")

    def record_attempt(self, info: Mapping[str, Any]) -> str:
        """Add what is known of an attempt at its start; returns the attempt's id.

        In it is the number of attempts that were there before, so that their order is read from no clock.
        """
        number = sum(not match["end"] for match in self._files())
        attempt = f"{info['from_step']:012d}-{number:06d}-{secrets.token_hex(6)}"
        self.store.create(f"{self.name}/attempts/{attempt}.json", encode_document(info))
        return attempt

    def record_end(self, attempt: str, info: Mapping[str, Any]) -> None:
        """Add what is known at the end of an attempt that was not cut off."""
        self.store.create(f"{self.name}/attempts/{attempt}.end.json", encode_document(info))

    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt, in the order in which they began; one that ended has `status`, and `to_step` or `error`.

        What is damaged or foreign is left out, and that is said: a run is more than what is told of it.
        """

        def read_file(name: str) -> dict[str, Any]:
            try:
                return self.read_attempt(name)
            except CheckpointError as error:
                logger.warning("%s It is left out.", error)
                return {}

        found = self._read(self._files(), read_file)
        return [info for _, info in sorted((each for each in found if "from_step" in each[1]), key=_order)]

    def run_halves(self, experiment: Experiment) -> list[tuple[RunSpec | None, bool]]:
        """The run half of every attempt, None where it cannot be read, and whether all that it asks for is saved."""
        # Those of 0.1.0, which have no number, left out what was asked for too late.
        return [
            (_run_half(experiment, info), info.get("status") == "complete" and _number(file) >= 0)
            for file, info in self._read(self._files(), self._readable)
        ]

    def last_error(self) -> str | None:
        """Why the latest attempt failed, if it did; one that was cut off did not. Reads few files.

        Where the order of some is not known, since they began together or have no number, all of them must have failed.
        """
        files = self._files()
        latest = max(((_number(file), file["from_step"]) for file in files), default=None)
        try:
            attempts = self._read([file for file in files if (_number(file), file["from_step"]) == latest])
        except CheckpointError as error:
            logger.warning("%s It does not say whether the attempt failed.", error)
            return None
        if not attempts or any(info.get("status") != "failed" for _, info in attempts):
            return None
        return str(attempts[-1][1].get("error"))

    def read_attempt(self, name: str) -> dict[str, Any]:
        """What one file of an attempt says. Raises CheckpointError when it is damaged or foreign."""
        if not _ATTEMPT_FILE.fullmatch(name):
            raise CheckpointError(f"{self.name}/attempts/{name}: got a stray object; expected attempts. Move it away.")
        return read_decoded(self.store, f"{self.name}/attempts/{name}", _decode_attempt)

    def _files(self) -> list[re.Match[str]]:
        return [match for match in map(_ATTEMPT_FILE.fullmatch, self.store.list(f"{self.name}/attempts")) if match]

    def _readable(self, name: str) -> dict[str, Any]:
        try:
            return self.read_attempt(name)
        except CheckpointError:
            return {}

    def _read(
        self, files: list[re.Match[str]], read_file: Callable[[str], dict[str, Any]] | None = None
    ) -> list[tuple[re.Match[str], dict[str, Any]]]:
        read_file = read_file or self.read_attempt
        read = dict(zip(files, self.store.map(lambda file: read_file(file[0]), files), strict=True))
        ends = {file[0]: info for file, info in read.items() if file["end"]}
        return [
            (file, info | ends.get(f"{file[0].removesuffix('.json')}.end.json", {}))
            for file, info in read.items()
            if not file["end"]
        ]


def _number(file: re.Match[str]) -> int:
    return int(file["number"] or -1)


def _order(attempt: tuple[re.Match[str], dict[str, Any]]) -> tuple[int, int, str]:
    file, info = attempt
    return _number(file), info["from_step"], info["started"]


def _decode_attempt(data: bytes, path: str) -> dict[str, Any]:
    """What a file of an attempt says, as it was written; what is known of it has the types of its record."""
    info, ends = decode_document(data, path), path.endswith(".end.json")
    record = structure(AttemptEnd if ends else Attempt, info, path)
    start = path.rpartition("/")[2].partition("-")[0]
    if isinstance(record, Attempt) and record.from_step != int(start):
        raise CheckpointError(f"{path}: got from_step {record.from_step}; expected {start}, as its name says.")
    return info


def step_path(run: str, folder: str, step: int) -> str:
    """Where the tensors of one step lie; `folder` is "checkpoints" or "state"."""
    return f"{run}/{folder}/step-{step:012d}.safetensors"


def saved_steps(store: Store, run: str, folder: str) -> list[int]:
    """The steps whose tensors lie in "checkpoints" or "state", ascending, from their names alone."""
    matches = map(_STEP_FILE.fullmatch, store.list(f"{run}/{folder}"))
    return sorted(int(match[1]) for match in matches if match)


def is_of_run(names: Iterable[str]) -> bool:
    """Whether a folder of those names is a run's, also one that has lost its spec."""
    return not RUN_OBJECTS.isdisjoint(names)


def list_runs(store: Store) -> list[RunSummary]:
    """Every run of a store, M4 before M16 and Minf last.

    From at most three listings each, and of a complete one the file that says so.
    """

    def summary(name: str) -> RunSummary | None:
        inside = store.list(name) if is_run_name(name) else []
        if not is_of_run(inside):
            return None
        status = Manifest(store, name).status() if "complete.json" in inside else "incomplete"
        # An imported run has no state.
        steps = saved_steps(store, name, "state") or saved_steps(store, name, "checkpoints")
        return RunSummary(name, status, max(steps, default=0))

    return [found for found in store.map(summary, sorted(store.list(), key=natural_order)) if found]


def read_spec(store: Store, name: str) -> Spec:
    """The spec of a run that is already there, with the run half of its latest attempt.

    Raises: StoreError when it is not there; CheckpointError when what is there is not the run.
    """
    check_run_name(name)
    try:
        experiment = stored_experiment(store, name)
    except MissingObjectError:
        if store.list(name):
            raise CheckpointError(
                f"{name}/spec.json: got nothing; expected the spec of this run. It was lost: train the run's spec "
                "again, which writes it and goes on from what is there."
            ) from None
        names = ", ".join(summary.name for summary in list_runs(store)) or "none"
        raise StoreError(f"{store.url}: got no run {name!r}; expected one of those there ({names}).") from None
    attempts = Manifest(store, name).attempts()
    try:
        return with_run_half(experiment, attempts[-1] if attempts else {})
    except SpecError as error:
        logger.warning("%s: the latest attempt's run half is another version's (%s); the default is shown", name, error)
        return with_run_half(experiment, {})


def _run_half(experiment: Experiment, attempt: Mapping[str, Any]) -> RunSpec | None:
    try:
        return with_run_half(experiment, attempt).run if "run" in attempt else None
    except SpecError:
        return None


def with_run_half(experiment: Experiment, attempt: Mapping[str, Any]) -> Spec:
    """The experiment as an attempt runs it, by default without one. Raises SpecError for another version's run half."""
    return spec_from_data({**spec_to_data(experiment), "run": attempt.get("run", {})})


def stored_experiment(store: Store, name: str) -> Experiment:
    """The experiment that a run's directory holds.

    Raises: CheckpointError unless it is, to the last bit, the one that its name says.
    """

    def decode(data: bytes, path: str) -> Experiment:
        try:
            experiment = decode_spec(data).experiment
        except SpecError as error:
            raise CheckpointError(
                f"{path}: got {error}; expected the spec of this run. It is damaged or foreign."
            ) from None
        if run_name(experiment) != name:
            raise CheckpointError(
                f"{path}: got the spec of {run_name(experiment)}; expected that of {name}. The data is foreign."
            )
        return experiment

    return read_decoded(store, f"{name}/spec.json", decode, _LARGEST_SPEC)
