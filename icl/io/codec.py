"""Spec <-> plain data <-> bytes. Strict: nothing is coerced, and every fault is reported at once with its JSON path."""

import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from os import PathLike, fspath
from typing import Any, TypeVar

import attrs
import cattrs
import orjson
from cattrs.gen import make_dict_structure_fn, override

from icl.core.errors import SpecError
from icl.core.fields import is_leaf, may_be_null, sections_of
from icl.core.rules import choice, plain
from icl.core.spec import Experiment, Spec

_Decoded = TypeVar("_Decoded")
_LARGEST_FILE = 2**26  # bytes; a list of the 100,000 runs that a sweep may have takes some ten million


def load_spec(source: "Spec | Mapping[str, Any] | str | PathLike[str]") -> Spec:
    """The spec in a JSON file, in plain data, or already made.

    Raises: SpecError with every fault of the spec, or saying why the file cannot be read.
    """
    if isinstance(source, Spec):
        return source
    if isinstance(source, Mapping):
        return spec_from_data(source)
    if not isinstance(source, (str, PathLike)):
        raise SpecError(f"spec: got a value of type {type(source).__name__}; expected a Spec, plain data or a path.")
    return in_file(fspath(source), decode_spec)


def decode_spec(data: bytes) -> Spec:
    """The spec in JSON bytes. Raises SpecError."""
    return spec_from_data(decode_json(data))


def in_file(path: str, decode: Callable[[bytes], _Decoded]) -> _Decoded:
    """What `decode` makes of a file's bytes. Raises SpecError whose faults name the file."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # the latter for a path that can be none
        reasons: dict[type[Exception], str] = {FileNotFoundError: "no such file", IsADirectoryError: "a directory"}
        reason = reasons.get(type(error)) or getattr(error, "strerror", None) or error
        raise SpecError(f"{path}: got {reason}; expected a readable JSON file. Correct the path.") from None
    if len(data) > _LARGEST_FILE:
        raise SpecError(f"{path}: got more than {_LARGEST_FILE} bytes; expected a JSON file. Correct the path.")
    try:
        return decode(data)
    except SpecError as error:
        raise SpecError(*(f"{path}: {fault}" for fault in error.faults)) from None


def decode_json(data: bytes) -> object:
    """Plain data in strict JSON: UTF-8, no NaN, no key twice. Raises SpecError."""
    if not data.strip():
        raise SpecError("got an empty file; expected a JSON object. Start from one in specs/.")
    try:
        plain = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise SpecError(
            f"line {error.lineno}, column {error.colno}: got text that is not JSON ({error.msg}); "
            "expected a JSON object in UTF-8. Correct it there."
        ) from None
    _refuse_repeated_keys(data)
    return plain


def spec_from_data(data: object) -> Spec:
    """The spec in plain data, such as `json.load` returns; "$schema", by which editors find the schema, is left out.

    Raises: SpecError.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"spec: got {shown(data)}; expected an object with the keys {', '.join(_keys(Spec))}.")
    try:
        return _CONVERTER.structure({key: value for key, value in data.items() if key != "$schema"}, Spec)
    except cattrs.ClassValidationError as error:
        raise SpecError(*_faults(error, "")) from None


def spec_to_data(spec: Experiment) -> dict[str, Any]:
    """Plain JSON data with every default filled in."""
    data: dict[str, Any] = orjson.loads(encode_spec(spec))
    return data


def encode_spec(spec: Experiment) -> bytes:
    """Canonical JSON: keys sorted at every depth, one spelling for every number; equal specs have equal bytes."""
    return orjson.dumps(attrs.asdict(spec), option=orjson.OPT_SORT_KEYS)


def with_run(spec: Spec, **changes: Any) -> Spec:
    """`spec` with fields of its `run` half replaced by those that are not None; its name stays. Raises SpecError."""
    given = {key: value for key, value in changes.items() if value is not None}
    try:
        return attrs.evolve(spec, run=attrs.evolve(spec.run, **given))
    except SpecError as error:
        raise SpecError(*(f"run.{fault}" for fault in error.faults)) from None


def _keys(cls: type) -> list[str]:
    return [field.name for field in attrs.fields(cls)]


def _register(converter: cattrs.Converter, cls: type) -> None:
    overrides: Any = {}
    for field in attrs.fields(cls):
        if is_leaf(field):
            overrides[field.name] = override(struct_hook=_leaf_hook(field))
            continue
        for section in sections_of(field):
            _register(converter, section)
        if may_be_null(field):
            overrides[field.name] = override(struct_hook=_null_hook(converter, *sections_of(field)))
        if "one_of" in field.metadata:
            table, by = field.metadata["one_of"], field.metadata["by"]
            overrides[field.name] = override(struct_hook=_table_hook(converter, table, by))
    function: Any = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True, **overrides
    )

    def structure(data: object, _: object) -> Any:
        if not isinstance(data, Mapping):
            raise SpecError(f": got {shown(data)}; expected an object with the keys {', '.join(_keys(cls))}.")
        return function(dict(data), cls)

    converter.register_structure_hook(cls, structure)


def _null_hook(converter: cattrs.Converter, cls: type) -> Any:
    return lambda value, _: None if value is None else converter.structure(value, cls)


def _table_hook(converter: cattrs.Converter, one_of: Mapping[str, type], by: str) -> Any:
    """For a section that names, in its field `by`, which class of a table it is; the first one by default."""
    rule = choice(*one_of)

    def structure(value: object, _: object) -> Any:
        name = plain(value.get(by, next(iter(one_of)))) if isinstance(value, Mapping) else next(iter(one_of))
        if not rule.accepts(name):
            raise SpecError(f"{by}: got {shown(name)}; expected {rule.expected}. Correct the value.")
        return converter.structure(value, one_of[name])

    return structure


def _leaf_hook(field: "attrs.Attribute[Any]") -> Any:
    def structure(value: object, _: object) -> object:
        converted = field.converter(value) if callable(field.converter) else value
        if not field.validator.accepts(converted):  # type: ignore[union-attr]
            expected = field.validator.expected  # type: ignore[union-attr]
            raise SpecError(f": got {shown(value)}; expected {expected}. Correct the value.")
        return converted

    return structure


def _faults(error: cattrs.ClassValidationError, path: str) -> Iterator[str]:
    misspelt = {near for inner in error.exceptions for near in _near_keys(inner).values()}
    for inner in error.exceptions:
        names = [note.name for note in getattr(inner, "__notes__", ()) if hasattr(note, "name")]
        where = ".".join(filter(None, (path, *names)))
        if isinstance(inner, cattrs.ClassValidationError):
            yield from _faults(inner, where)
        elif isinstance(inner, cattrs.ForbiddenExtraKeysError):
            near = _near_keys(inner)
            for key in sorted(inner.extra_fields, key=str):
                advice = f"Did you mean {near[key]!r}?" if key in near else "Remove it."
                expected = f"one of {', '.join(_keys(inner.cl))}"
                yield f"{'.'.join(filter(None, (where, str(key))))}: got an unknown key; expected {expected}. {advice}"
        elif isinstance(inner, KeyError):
            if inner.args[0] not in misspelt:  # which is said where the other spelling is
                yield f"{where}: got nothing; expected a value, which has no default. Add the key."
        elif isinstance(inner, SpecError):
            for fault in inner.faults:
                yield f"{where}{fault}" if fault.startswith(":") or not where else f"{where}.{fault}"
        else:
            raise inner


def _near_keys(error: BaseException) -> dict[object, str]:
    """For each unknown key that resembles a known one, that."""
    if not isinstance(error, cattrs.ForbiddenExtraKeysError):
        return {}
    found = {key: difflib.get_close_matches(str(key), _keys(error.cl), n=1) for key in error.extra_fields}
    return {key: near[0] for key, near in found.items() if near}


def shown(value: object) -> str:
    """A value as the user wrote it, shortened."""
    if isinstance(value, Mapping):
        return "an object"
    try:
        text = json.dumps(plain(value))
    except (TypeError, ValueError, RecursionError):
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse_repeated_keys(data: bytes) -> None:
    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        if repeated:
            raise SpecError(f"{repeated[0]}: got the key twice in one object; expected it once. Remove one.")
        return dict(pairs)

    try:
        json.loads(data, object_pairs_hook=hook, parse_int=len, parse_float=len)  # only the keys matter
    except RecursionError:
        raise SpecError("got JSON nested too deeply; expected an object as in specs/. Correct it.") from None


_CONVERTER = cattrs.Converter()
_register(_CONVERTER, Spec)
