"""Fields of a spec set from outside: `task.num_tasks=8` on a command line, or the parameters of a W&B sweep.

A foreign tool spells fields and numbers in its own ways; they are translated here, and what results is judged like any
other spec.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from icl.core.errors import SpecError
from icl.io.codec import shown

Values = dict[str, Any]
"""Field, as a dotted path, -> its value."""

_PRIVATE = re.compile(r"_.*|wandb_version")  # keys that W&B adds for itself
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def parse_assignments(texts: Iterable[str]) -> Values:
    """The fields that texts such as "task.num_tasks=8" set; a value that is not JSON is text. Raises SpecError."""
    values: Values = {}
    for text in texts:
        field, equals, value = text.partition("=")
        if not equals or not field:
            raise SpecError(f"--set: got {text!r}; expected FIELD=VALUE, as in task.num_tasks=8.")
        try:
            values[field] = orjson.loads(value)
        except orjson.JSONDecodeError:
            values[field] = value
    return values


def read_parameters(data: object) -> Values:
    """The fields that a W&B agent's parameters set: nested objects, `a.b` and `a/b` are one spelling, "1e-3" a number.

    Raises: SpecError when a field is set twice.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"parameters: got {shown(data)}; expected an object of field: value.")
    values: Values = {}
    for field, value in _flattened(data):
        if field in values:
            raise SpecError(f"{field}: got it in two spellings; expected it once. Remove one.")
        values[field] = float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value
        if isinstance(value, str) and value.isdecimal():
            values[field] = int(value)
    return values


def assigned(base: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """`base` with the values put in; what is not an object on the way to a field is replaced by one."""
    data = copy.deepcopy(dict(base))
    for field, value in values.items():
        *parents, leaf = field.split(".")
        owner = data
        for parent in parents:
            if not isinstance(owner.get(parent), dict):
                owner[parent] = {}
            owner = owner[parent]
        owner[leaf] = value
    return data


def _flattened(data: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if _PRIVATE.fullmatch(key):
            continue
        field = above + key.replace("/", ".")
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{field}.")
        else:
            yield field, value
