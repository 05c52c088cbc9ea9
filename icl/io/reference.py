"""The fields of a spec as tables in Markdown, from their rules, defaults and help texts."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import attrs

from icl.core.fields import default_data, has_default, is_leaf, may_be_null, sections_of
from icl.core.spec import Spec


def fields_reference() -> str:
    """A table for each section, a row for each field. docs/spec.md ends with it, after its heading."""
    sections = dict[type, tuple[str, list[str]]]()
    for cls, by, path in _sections(Spec, "", ""):
        sections.setdefault(cls, (by, []))[1].append(path)
    lines, written = [""], set[str]()
    for cls, (by, paths) in sections.items():
        lines += _section(cls, by, paths, written)
    return "\n".join(lines)


def _sections(cls: type, by: str, path: str) -> Iterator[tuple[type, str, str]]:
    """Every section with the field that names its class, if one does, and its place, such as "training.optimizer."."""
    yield cls, by, path
    for field in attrs.fields(cls):
        for section in sections_of(field):
            yield from _sections(section, field.metadata.get("by", ""), f"{path}{field.name}.")


def _section(cls: type, by: str, paths: list[str], written: set[str]) -> Iterator[str]:
    """The lines of one section, without the rows that are `written`; its own are added there."""
    rows = {field.name: _row(field, paths) for field in attrs.fields(cls) if field.name != by}
    if cls is not Spec:
        place = " and ".join(f"`{path[:-1]}`" for path in paths)
        choice = f' with `"{by}": "{attrs.fields_dict(cls)[by].default}"`\n\n{inspect.getdoc(cls)}' if by else ""
        yield f"### {place}{choice}\n"
    if fresh := [row for row in rows.values() if row not in written]:
        yield from ("| field | accepted | default | meaning |", "|---|---|---|---|", *fresh, "")
    if again := [f"`{name}`" for name, row in rows.items() if row in written]:
        yield f"{', '.join(again)}: as above.\n"
    written.update(rows.values())


def _row(field: "attrs.Attribute[Any]", paths: list[str]) -> str:
    names = ", ".join(f"`{path}{field.name}`" for path in paths)
    meaning = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", field.metadata["help"])
    return f"| {names} | {_accepted(field)} | {_default(field)} | {meaning} |"


def _accepted(field: "attrs.Attribute[Any]") -> str:
    if is_leaf(field):
        return field.validator.expected  # type: ignore[union-attr,no-any-return]
    if "one_of" in field.metadata:
        first, *others = (f'"{name}"' for name in field.metadata["one_of"])
        return f"an object; {field.metadata['by']} is {' or '.join([f'{first} (default)', *others])}"
    return "an object, or null" if may_be_null(field) else "an object"


def _default(field: "attrs.Attribute[Any]") -> str:
    if "default" in field.metadata:
        return str(field.metadata["default"])
    return f"`{json.dumps(default_data(field))}`" if has_default(field) else "required"
