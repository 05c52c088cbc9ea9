"""The JSON Schema of a spec, from the rules, defaults and help texts of its fields."""

from typing import Any

import attrs

from icl.core.fields import default_data, has_default, is_leaf, may_be_null, sections_of
from icl.core.spec import Spec

EDITORS_KEY_HELP = "Where an editor finds this schema, such as docs/spec.schema.json. It is not part of the spec."


def spec_json_schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of the spec for editors; cross-field rules are checked on loading only."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "icl spec", **_section_schema(Spec)}
    schema["properties"] = {"$schema": {"type": "string", "description": EDITORS_KEY_HELP}, **schema["properties"]}
    return schema


def _section_schema(cls: type) -> dict[str, Any]:
    fields = attrs.fields(cls)
    return {
        "description": (cls.__doc__ or "").splitlines()[0],
        "type": "object",
        "additionalProperties": False,
        "properties": {field.name: _field_schema(field) for field in fields},
        "required": [field.name for field in fields if not has_default(field)],
    }


def _field_schema(field: "attrs.Attribute[Any]") -> dict[str, Any]:
    schema = _values_schema(field) | {"description": field.metadata["help"]}
    if "default" in field.metadata:
        schema["description"] += f" Default: {field.metadata['default']}."
    elif has_default(field):
        schema["default"] = default_data(field)
    return schema


def _values_schema(field: "attrs.Attribute[Any]") -> dict[str, Any]:
    if is_leaf(field):
        return dict(field.validator.schema)  # type: ignore[union-attr]
    accepted = [_section_schema(section) for section in sections_of(field)]
    for section in accepted[1:]:
        section["required"] = [field.metadata["by"], *section["required"]]  # the first is the default
    accepted += [{"type": "null"}] * may_be_null(field)
    return accepted[0] if len(accepted) == 1 else {"anyOf": accepted}
