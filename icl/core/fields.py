"""What the fields of a spec say of themselves: a value under a rule, a section, or one section of a table.

A field's attrs metadata:
    help: one sentence or two for the user. Every field has it.
    default: in words, where it depends on another field.
    of: the section's class, where the section may be null.
    one_of, by: the table of the section's classes, the default first, and the field in which a section names its own.
"""

from typing import Any

import attrs

from icl.core.rules import Rule


def is_leaf(field: "attrs.Attribute[Any]") -> bool:
    """Whether the field holds a value under a rule; if not, it holds a section."""
    return isinstance(field.validator, Rule)


def sections_of(field: "attrs.Attribute[Any]") -> list[type]:
    """The classes of the section that the field holds: those of its table, or one; none for a value."""
    if is_leaf(field):
        return []
    if "one_of" in field.metadata:
        return list(field.metadata["one_of"].values())
    section: Any = field.metadata.get("of", field.type)
    return [section]


def may_be_null(field: "attrs.Attribute[Any]") -> bool:
    """Whether a section may be null; a value's rule says that itself."""
    return "of" in field.metadata


def has_default(field: "attrs.Attribute[Any]") -> bool:
    """Whether the field may be left out."""
    return field.default is not attrs.NOTHING


def default_data(field: "attrs.Attribute[Any]") -> Any:
    """The default as plain data; of a section only what differs from the section's own defaults."""
    return _plain_data(field.default)


def _plain_data(value: Any) -> Any:
    if not attrs.has(type(value)):
        return list(value) if isinstance(value, tuple) else value
    return {
        field.name: _plain_data(getattr(value, field.name))
        for field in attrs.fields(type(value))
        if getattr(value, field.name) != field.default and "default" not in field.metadata
    }
