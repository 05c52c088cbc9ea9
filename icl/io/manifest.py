"""What is told of a run in JSON: its spec, every attempt to train it, whether it is complete. Reads no tensors.

A listing of a store, or of a sweep, is made of these and of file names; none of it needs torch.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Any

import attrs

from icl.core.errors import SpecError
from icl.core.spec import RunSpec, Spec
from icl.io.codec import decode_spec, spec_from_data, spec_to_data
from icl.io.documents import decode_document, encode_document
from icl.io.errors import CheckpointError, MissingObjectError, StoreError
from icl.io.names import check_run_name, natural_order, run_name
from icl.io.store import Store

_STEP_FILE = re.compile(r"step-(\d{12})\.safetensors")


@attrs.frozen
class RunSummary:
    """A run as a listing shows it: `step` is the newest one it can be resumed from."""

    name: str
    status: str
    step: int


@attrs.frozen
class Manifest:
    """The attempts to train one run of a store, and whether one has completed it."""

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
        """Add what is known of an attempt at its start; returns the attempt's id."""
        attempt = f"{info['from_step']:012d}-{secrets.token_hex(6)}"
        self.store.create(f"{self.name}/attempts/{attempt}.json", encode_document(info))
        return attempt

    def record_end(self, attempt: str, info: Mapping[str, Any]) -> None:
        """Add what is known at the end of an attempt that was not cut off."""
        self.store.create(f"{self.name}/attempts/{attempt}.end.json", encode_document(info))

    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt, in the order in which they began; one that ended has `to_step` and `status`."""
        return self._read(self.store.list(f"{self.name}/attempts"))

    def last_error(self) -> str | None:
        """Why the latest attempt failed, if it did; one that was cut off did not. Reads few files."""
        names = self.store.list(f"{self.name}/attempts")
        newest = max((name.partition("-")[0] for name in names), default="")
        attempts = self._read([name for name in names if name.startswith(f"{newest}-")])
        return str(attempts[-1]["error"]) if attempts and attempts[-1].get("status") == "failed" else None

    def _read(self, names: list[str]) -> list[dict[str, Any]]:
        paths = [f"{self.name}/attempts/{name}" for name in names]
        files = dict(zip(names, self.store.map(self._read_document, paths), strict=True))
        found = [
            info | files.get(f"{file.removesuffix('.json')}.end.json", {})
            for file, info in files.items()
            if not file.endswith(".end.json")
        ]
        return sorted(found, key=lambda attempt: (int(attempt["from_step"]), str(attempt["started"])))

    def _read_document(self, path: str) -> dict[str, Any]:
        return decode_document(self.store.read(path), path)


def step_path(run: str, folder: str, step: int) -> str:
    """Where the tensors of one step lie; `folder` is "checkpoints" or "state"."""
    return f"{run}/{folder}/step-{step:012d}.safetensors"


def saved_steps(store: Store, run: str, folder: str) -> list[int]:
    """The steps whose tensors lie in "checkpoints" or "state", ascending, from their names alone."""
    matches = map(_STEP_FILE.fullmatch, store.list(f"{run}/{folder}"))
    return sorted(int(match[1]) for match in matches if match)


def list_runs(store: Store) -> list[RunSummary]:
    """Every run of a store, M4 before M16 and Minf last, from two listings each and without opening a file."""

    def summary(name: str) -> RunSummary | None:
        inside = store.list(name)
        if "spec.json" not in inside:
            return None
        status = "complete" if "complete.json" in inside else "incomplete"
        return RunSummary(name, status, max(saved_steps(store, name, "state"), default=0))

    return [found for found in store.map(summary, sorted(store.list(), key=natural_order)) if found]


def read_spec(store: Store, name: str) -> Spec:
    """The spec of a run that is already there, with the run half of its latest attempt.

    Raises: StoreError when it is not there; CheckpointError when what is there is not the run.
    """
    check_run_name(name)
    try:
        spec = stored_spec(store, name)
    except MissingObjectError:
        names = ", ".join(summary.name for summary in list_runs(store)) or "none"
        raise StoreError(f"{store.url}: got no run {name!r}; expected one of those there ({names}).") from None
    attempts = Manifest(store, name).attempts()
    return spec_from_data({**spec_to_data(spec), "run": attempts[-1].get("run", {})}) if attempts else spec


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
