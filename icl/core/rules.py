"""What a field of a spec accepts: rules, and what makes a value plain before a rule judges it."""

import math
import re
from collections.abc import Callable
from typing import Any

import attrs

from icl.core.errors import SpecError

MAX_INT = 2**31 - 1


@attrs.frozen
class Rule:
    """What a field accepts: as a test, in words, and as JSON Schema. Used as the field's attrs validator."""

    accepts: Callable[[Any], bool]
    expected: str
    schema: dict[str, Any]

    def __call__(self, instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if not self.accepts(value):
            raise SpecError(f"{attribute.name}: got {value!r}; expected {self.expected}. Correct the value.")


def integer(low: int, high: int = MAX_INT) -> Rule:
    """An integer in [low, high]; `True` and `1.0` are none."""
    return Rule(
        lambda value: type(value) is int and low <= value <= high,
        f"an integer from {low} to {high}",
        {"type": "integer", "minimum": low, "maximum": high},
    )


def number(low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> Rule:
    """A finite float in [low, high]; `above` and `below` leave out the ends."""

    def accepts(value: object) -> bool:
        if type(value) is not float or not math.isfinite(value):
            return False
        return (low < value if above else low <= value) and (value < high if below else value <= high)

    words = f"a finite number {'>' if above else '>='} {low:g}"
    schema: dict[str, Any] = {"type": "number", "exclusiveMinimum" if above else "minimum": low}
    if math.isfinite(high):
        words += f" and {'<' if below else '<='} {high:g}"
        schema["exclusiveMaximum" if below else "maximum"] = high
    return Rule(accepts, words, schema)


def optional(rule: Rule) -> Rule:
    """What `rule` accepts, or None."""
    return Rule(
        lambda value: value is None or rule.accepts(value),
        f"{rule.expected}, or null",
        {"anyOf": [rule.schema, {"type": "null"}]},
    )


def tuple_of(rule: Rule, length: int | None = None) -> Rule:
    """A tuple of what `rule` accepts, of that length if one is given."""

    def accepts(value: object) -> bool:
        return isinstance(value, tuple) and length in (None, len(value)) and all(map(rule.accepts, value))

    schema: dict[str, Any] = {"type": "array", "items": rule.schema}
    if length is not None:
        schema |= {"minItems": length, "maxItems": length}
    return Rule(accepts, f"a list of {'' if length is None else f'{length} times '}{rule.expected}", schema)


def choice(*values: str) -> Rule:
    """One of these strings."""
    return Rule(
        lambda value: type(value) is str and value in values,
        "one of " + ", ".join(f'"{value}"' for value in values),
        {"enum": list(values)},
    )


BOOLEAN = Rule(lambda value: type(value) is bool, "true or false", {"type": "boolean"})
TEXT = Rule(
    lambda value: type(value) is str and bool(value.strip()) and not re.search("[\0-\x1f\x7f\ud800-\udfff]", value),
    "a non-empty string without control characters",
    {"type": "string", "pattern": r"^[^\u0000-\u001f\u007f]+$"},
)
SEED = integer(0, 2**64 - 1)
COUNT = integer(1)
LAYERS = integer(1, 4096)  # so that listing parameters is quick
_PYTHON: dict[str, Callable[[Any], Any]] = {"b": bool, "i": int, "u": int, "f": float, "U": str}


def plain(value: Any) -> Any:
    """NumPy's numbers and strings as Python's, alone, in a list or in an array; the rules judge what they are."""
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", None) == 1:
        return [_plain_scalar(item) for item in value]
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    convert = _PYTHON.get(getattr(getattr(value, "dtype", None), "kind", ""))
    return convert(value) if convert and value.ndim == 0 else value


def as_float(value: Any) -> Any:
    """`1` and `1.0`, `0.0` and `-0.0` are one number; anything but an integer is left for the rule to judge."""
    return float(value) + 0.0 if type(value) in (int, float) and abs(value) <= 2**1023 else value


def as_floats(value: Any) -> Any:
    """`as_float` of each number in a list, as a tuple."""
    return tuple(map(as_float, value)) if isinstance(value, (list, tuple)) else value


def as_tuple(value: Any) -> Any:
    """A list as a tuple, which cannot be changed."""
    return tuple(value) if isinstance(value, list) else value


def as_path(value: Any) -> Any:
    """A `pathlib.Path` as the string that it stands for."""
    return value.__fspath__() if hasattr(value, "__fspath__") else value


def finite_or_none(value: Any) -> Any:
    """Infinite task diversity has one spelling inside: None."""
    infinite = (type(value) is str and value in ("inf", "Infinity")) or (type(value) is float and value == math.inf)
    return None if infinite else value


def with_plain_values(_: type, fields: "list[attrs.Attribute[Any]]") -> "list[attrs.Attribute[Any]]":
    """The fields of a section, whose values are made plain before their own converter, if they have one, sees them."""

    def changed(field: "attrs.Attribute[Any]") -> "attrs.Attribute[Any]":
        if not isinstance(field.validator, Rule):  # a section
            return field
        own: Any = field.converter or _unchanged
        return field.evolve(converter=lambda value: own(plain(value)))

    return list(map(changed, fields))


def _unchanged(value: Any) -> Any:
    return value
