"""What the documents and the metadata of a run say, as typed data: the one place where they are decoded.

Unknown keys are passed over, since a later version may add some; what is known must be of its type and in its bounds.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import orjson

from icl.core.rules import MAX_INT, Rule, integer, optional
from icl.io.codec import shown
from icl.io.errors import CheckpointError

_Record = TypeVar("_Record")
_LAST_STEP = 10**12 - 1  # what a file's name has digits for


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _maps_text(value: object) -> bool:
    return type(value) is dict and all(type(item) is str for item in value.values())


def _counts(value: object) -> bool:
    return type(value) is dict and all(_is_number(item) for item in value.values())


def _parsed(value: object) -> object:
    try:
        return orjson.loads(value) if type(value) is str else None
    except orjson.JSONDecodeError:
        return None


def _are_names(value: object) -> bool:
    return type(value) is list and all(type(item) is str for item in value) and len(set(value)) == len(value)


_ANYTHING = Rule(lambda value: True, "anything", {})
_TEXT = Rule(lambda value: type(value) is str, "a string", {"type": "string"})
_SHORT = Rule(lambda value: type(value) is str and len(value) <= 1000, "a string of at most 1000 characters", {})
_BOOLEAN = Rule(lambda value: type(value) is bool, "true or false", {"type": "boolean"})
_STEP = integer(0, _LAST_STEP)
_STATUS = Rule(lambda value: value in ("complete", "interrupted", "failed"), "complete, interrupted or failed", {})
_TEXTS = Rule(lambda value: type(value) is list and all(type(item) is str for item in value), "a list of strings", {})
_WORDS = Rule(_maps_text, "an object of strings", {})
_OBJECT = Rule(lambda value: type(value) is dict, "an object", {"type": "object"})
_PROFILE = Rule(
    lambda value: type(value) is dict and all(map(_counts, value.values())), "an object of objects of numbers", {}
)
_SECONDS = Rule(lambda value: _is_number(value) and value > 0, "a finite number above 0", {})
_STEP_TEXT = Rule(
    lambda value: type(value) is str and bool(re.fullmatch("0|[1-9][0-9]{0,11}", value)), "the digits of a step", {}
)
_DIGEST = Rule(lambda value: type(value) is str and bool(re.fullmatch("[0-9a-f]{64}", value)), "64 hex digits", {})
_WORDS_TEXT = Rule(lambda value: _maps_text(_parsed(value)), "an object of strings, as JSON", {})
_NAMES_TEXT = Rule(lambda value: _are_names(_parsed(value)), "a list of different strings, as JSON", {})


@attrs.frozen(kw_only=True)
class Attempt:
    """An attempt at its start. Whether `run` is a run half is for the spec's own decoder to say."""

    from_step: int = attrs.field(metadata={"rule": _STEP})
    started: str = attrs.field(metadata={"rule": _TEXT})
    host: str = attrs.field(metadata={"rule": _TEXT}, default="")
    pid: int = attrs.field(metadata={"rule": integer(0)}, default=0)
    python: str = attrs.field(metadata={"rule": _TEXT}, default="")
    platform: str = attrs.field(metadata={"rule": _TEXT}, default="")
    command: list[str] = attrs.field(metadata={"rule": _TEXTS}, factory=list)
    environment: dict[str, str] = attrs.field(metadata={"rule": _WORDS}, factory=dict)
    versions: dict[str, str] = attrs.field(metadata={"rule": _WORDS}, factory=dict)
    backend: dict[str, str] = attrs.field(metadata={"rule": _WORDS}, factory=dict)
    run: object = attrs.field(metadata={"rule": _ANYTHING}, factory=dict)
    wandb: dict[str, Any] | None = attrs.field(metadata={"rule": optional(_OBJECT)}, default=None)


@attrs.frozen(kw_only=True)
class AttemptEnd:
    """An attempt at its end: the step it reached, or why it failed."""

    status: str = attrs.field(metadata={"rule": _STATUS})
    to_step: int | None = attrs.field(metadata={"rule": optional(_STEP)}, default=None)
    error: str | None = attrs.field(metadata={"rule": optional(_TEXT)}, default=None)
    profile: dict[str, dict[str, float]] = attrs.field(metadata={"rule": _PROFILE}, factory=dict)
    wandb_url: str | None = attrs.field(metadata={"rule": optional(_TEXT)}, default=None)


@attrs.frozen(kw_only=True)
class Complete:
    """A run that is complete, and its last step."""

    step: int = attrs.field(metadata={"rule": _STEP})


@attrs.frozen(kw_only=True)
class Owner:
    """One beat of the process that trains a run; `released` says that it has let go of it."""

    host: str = attrs.field(metadata={"rule": _SHORT}, default="")
    pid: int = attrs.field(metadata={"rule": integer(1)}, default=0)
    started: str = attrs.field(metadata={"rule": _SHORT}, default="")
    token: str = attrs.field(metadata={"rule": _SHORT}, default="")
    every: float = attrs.field(metadata={"rule": _SECONDS}, default=0.0)
    count: int = attrs.field(metadata={"rule": integer(0, MAX_INT)}, default=0)
    released: bool = attrs.field(metadata={"rule": _BOOLEAN}, default=False)


@attrs.frozen(kw_only=True)
class StepFile:
    """The metadata of a checkpoint or a state."""

    kind: str = attrs.field(metadata={"rule": _SHORT})
    run: str = attrs.field(metadata={"rule": _SHORT})
    step: int = attrs.field(metadata={"rule": _STEP_TEXT}, converter=int)
    backend: dict[str, str] = attrs.field(metadata={"rule": _WORDS_TEXT}, converter=orjson.loads)
    tensors_sha256: str = attrs.field(metadata={"rule": _DIGEST})

    @property
    def file(self) -> str:
        """The name that a file of this metadata has."""
        return f"step-{self.step:012d}.safetensors"


@attrs.frozen(kw_only=True)
class SegmentFile:
    """The metadata of the metrics of updates start+1..stop; `names` are those of the columns of `values`."""

    kind: str = attrs.field(metadata={"rule": _SHORT})
    run: str = attrs.field(metadata={"rule": _SHORT})
    start: int = attrs.field(metadata={"rule": _STEP_TEXT}, converter=int)
    stop: int = attrs.field(metadata={"rule": _STEP_TEXT}, converter=int)
    names: list[str] = attrs.field(metadata={"rule": _NAMES_TEXT}, converter=orjson.loads)
    backend: dict[str, str] = attrs.field(metadata={"rule": _WORDS_TEXT}, converter=orjson.loads)
    tensors_sha256: str = attrs.field(metadata={"rule": _DIGEST})

    @property
    def file(self) -> str:
        """The name that a file of this metadata has."""
        return f"{self.start:012d}-{self.stop:012d}-{self.tensors_sha256[:12]}.safetensors"


def structure(cls: type[_Record], data: object, where: str) -> _Record:
    """The record in plain data. Raises CheckpointError, naming `where` and every field that does not fit."""
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{where}: got {shown(data)}; expected an object. It is damaged or foreign.")
    fields = attrs.fields(cls)  # type: ignore[arg-type]
    fitting = known(cls, data)
    faults = [
        f"{field.name} {shown(data[field.name])} for {field.metadata['rule'].expected}"
        for field in fields
        if field.name in data and field.name not in fitting
    ]
    faults += [f"no {field.name}" for field in fields if field.name not in data and field.default is attrs.NOTHING]
    if faults:
        raise CheckpointError(
            f"{where}: got {', '.join(faults)}; expected what this version writes. "
            "It is foreign: another version's, or another tool's."
        )
    return cls(**fitting)


def known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a record that are there and fit."""
    rules = {field.name: field.metadata["rule"] for field in attrs.fields(cls)}
    return {name: data[name] for name, rule in rules.items() if name in data and rule.accepts(data[name])}
