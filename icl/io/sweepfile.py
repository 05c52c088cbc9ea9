"""A sweep as data: a base spec and axes over its fields, expanded by a pure function to named run specs."""

import hashlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import attrs

from icl.core.errors import SpecError
from icl.core.spec import Spec
from icl.io.codec import decode_json, in_file, shown, spec_from_data, with_run
from icl.io.location import resolve_location
from icl.io.names import run_name
from icl.io.overrides import Values, assigned

MAX_RUNS = 100_000
_KEYS = ("base", "list", "zip", "grid")
_RANGE_KEYS = {"from", "to", "step", "powers_of"}
_MOST_FAULTS = 20


@attrs.frozen
class Member:
    """One run of a sweep; `values` set it apart from the others."""

    name: str
    spec: Spec
    values: Values


@attrs.frozen
class Sweep:
    """Every run of a sweep, in the order of the file; its name tells sweeps of other runs apart."""

    name: str
    members: tuple[Member, ...]

    @property
    def store(self) -> str:
        """The URL of the store of every run. Raises SpecError when there is more than one; StoreError for no URL."""
        stores = {
            resolve_location(store): store for store in sorted({member.spec.run.store for member in self.members})
        }
        if len(stores) > 1:
            raise SpecError(f"run.store: got {', '.join(stores.values())} in one sweep; expected one. Give --store.")
        return next(iter(stores.values()))

    def shard(self, index: int, count: int) -> "Sweep":
        """Every `count`-th member from `index` on: the parts of a sweep that as many machines take."""
        return attrs.evolve(self, members=self.members[index::count])


def load_sweep(path: "str | os.PathLike[str]", **run: Any) -> Sweep:
    """The sweep in a JSON file; a `base` that is a path is relative to it.

    Args:
        run: fields of every spec's `run` half to replace, where they are not None.

    Raises: SpecError with every fault, or saying why a file cannot be read.
    """
    path = os.fspath(path)
    plain = inline_sweep(path)
    try:
        return expand_sweep(plain, PurePath(path).stem, **run)
    except SpecError as error:
        raise SpecError(*(f"{path}: {fault}" for fault in error.faults)) from None


def inline_sweep(path: "str | os.PathLike[str]") -> object:
    """The plain data of a sweep file with its base in it, so that it stands alone. Raises SpecError."""
    path = os.fspath(path)

    def decode(data: bytes) -> object:
        plain = decode_json(data)
        if isinstance(plain, dict) and isinstance(plain.get("base"), str):
            plain = {**plain, "base": in_file(os.path.join(os.path.dirname(path), plain["base"]), decode_json)}
        return plain

    return in_file(path, decode)


def expand_sweep(data: object, stem: str = "sweep", **run: Any) -> Sweep:
    """The runs of a sweep in plain data.

    They are the product of `list` (objects of field: value), `zip` (fields that vary together) and `grid` (fields that
    are crossed), in that order, the last field of `grid` the fastest. The values of a field are a list, a range or a
    list with ranges in it: `{"from": 0, "to": 10}`, `{"powers_of": 2, "from": 0, "to": 20}`, each with a `step`, both
    ends included.

    Raises: SpecError with every fault, among them two runs that are one experiment.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"sweep: got {shown(data)}; expected an object with the keys {', '.join(_KEYS)}.")
    unknown = [f"{key}: got an unknown key; expected one of {', '.join(_KEYS)}." for key in data if key not in _KEYS]
    if not isinstance(data.get("base"), Mapping):
        unknown.append("base: got no object; expected a spec, or the path of one relative to this file. Add it.")
    if unknown:
        raise SpecError(*unknown)
    members: dict[str, Member] = {}
    faults: dict[str, str] = {}  # fault -> the first run that has it
    for values in _assignments(data):
        try:
            spec = with_run(spec_from_data(assigned(data["base"], values)), **run)
        except SpecError as error:
            faults = {fault: describe_values(values) for fault in error.faults} | faults
            if len(faults) > _MOST_FAULTS:
                break
            continue
        name = run_name(spec)
        if name in members:
            twice = f"sweep: got one experiment twice, as {describe_values(members[name].values)}; expected it once."
            faults.setdefault(twice, describe_values(values))
        members[name] = Member(name, spec, values)
    if faults:
        raise SpecError(*(f"{fault} (In the run {where}.)" if where else fault for fault, where in faults.items()))
    digest = hashlib.sha256("\n".join(members).encode()).hexdigest()[:12]
    return Sweep(f"{stem}-{digest}", tuple(members.values()))


def describe_values(values: Values) -> str:
    """What sets a run apart, e.g. "num_tasks=16 init=3"."""
    return " ".join(f"{field.rpartition('.')[2]}={shown(value)}" for field, value in values.items())


def _assignments(data: Mapping[str, Any]) -> Iterator[Values]:
    """The values of every run. Raises SpecError with every fault of the axes."""
    faults: list[str] = []
    parts: list[list[Values]] = []
    fields: list[str] = []
    listed = data.get("list", [{}])
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        faults.append(f"list: got {shown(listed)}; expected a non-empty list of objects of field: value.")
    else:
        parts.append(listed)
        fields += {field for each in listed for field in each}
    axes = {}
    for kind in ("zip", "grid"):
        found = data.get(kind, {})
        if not isinstance(found, dict):
            faults.append(f"{kind}: got {shown(found)}; expected an object of field: values.")
            continue
        for field, values in found.items():
            try:
                axes[kind, field] = list(_values(values))
            except SpecError as error:
                faults += [f"{kind}.{field}: {fault}" for fault in error.faults]
            fields.append(field)
    lengths = {field: len(values) for (kind, field), values in axes.items() if kind == "zip"}
    if len(set(lengths.values())) > 1:
        faults.append(f"zip: got {lengths}; expected as many values of each field.")
    for field in sorted({field for field in fields if fields.count(field) > 1}):
        faults.append(f"{field}: got values in two places; expected them in one of list, zip and grid.")
    if faults:
        raise SpecError(*faults)
    if lengths:
        zipped = {field: values for (kind, field), values in axes.items() if kind == "zip"}
        parts.append([dict(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)])
    parts += [[{field: value} for value in values] for (kind, field), values in axes.items() if kind == "grid"]
    count = math.prod(map(len, parts))
    if count > MAX_RUNS:
        raise SpecError(f"sweep: got {count} runs; expected at most {MAX_RUNS}. Split it.")
    for row in itertools.product(*parts):
        yield {field: value for values in row for field, value in values.items()}


def _values(values: object) -> Iterator[Any]:
    if isinstance(values, dict):
        values = [values]
    if not isinstance(values, list) or not values:
        raise SpecError(f"got {shown(values)}; expected a non-empty list of values, or a range such as {_EXAMPLE}.")
    for value in values:
        if isinstance(value, dict) and "from" in value:
            yield from _range(value)
        else:
            yield value


_EXAMPLE = '{"from": 0, "to": 10}'


def _range(given: Mapping[str, Any]) -> Iterator[Any]:
    """A range's values; whole ones are integers, and powers with a broken exponent are rounded to whole ones."""
    numbers = {"step": 1, **given}
    base: Any = numbers.get("powers_of")
    start: Any = numbers["from"]
    stop: Any = numbers.get("to")
    step: Any = numbers["step"]
    if (
        not set(numbers) <= _RANGE_KEYS
        or any(type(number) not in (int, float) or not math.isfinite(number) for number in numbers.values())
        or stop is None
        or not (start <= stop and step > 0 and (base is None or base > 1))
    ):
        raise SpecError(f'got the range {dict(given)}; expected {_EXAMPLE} or {{"powers_of": 2, "from": 0, "to": 20}}.')
    last = (stop - start) / step + 1e-9  # the last value may be a rounding error above `to`
    if last >= MAX_RUNS or (base is not None and stop * math.log2(base) > 64):
        raise SpecError(f"got the range {dict(given)}; expected at most {MAX_RUNS} values, none above 2^64.")
    for value in (start + index * step for index in range(int(last) + 1)):
        if base is None:
            yield value
        else:
            yield round(base**value) if value >= 0 else float(base**value)
