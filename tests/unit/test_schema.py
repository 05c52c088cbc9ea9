"""The JSON Schema accepts what the code accepts, and its defaults are those of the code."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest

from icl.core.architectures import ARCHITECTURES
from icl.core.families import FAMILIES
from icl.core.fields import has_default
from icl.core.optimizers import OPTIMIZERS
from icl.io.codec import spec_from_data, spec_to_data
from icl.io.schema import spec_json_schema
from tests.unit.test_codec import MINIMAL, changed

ROOT = Path(__file__).parents[2]
SCHEMA = spec_json_schema()


def chosen(schema: dict[str, Any], data: Any) -> dict[str, Any]:
    """Of several schemas of one section, that under which `data` is valid."""
    return next(each for each in schema.get("anyOf", [schema]) if jsonschema.Draft202012Validator(each).is_valid(data))


def filled(schema: dict[str, Any], data: Any) -> Any:
    """`data` with the schema's defaults, as an editor puts them in."""
    if not isinstance(data, dict):
        return data
    properties = chosen(schema, data)["properties"]
    defaults = {name: field["default"] for name, field in properties.items() if "default" in field}
    return {name: filled(properties[name], value) for name, value in (defaults | data).items()}


def fields_in(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field in a schema."""
    for section in schema.get("anyOf", [schema]):
        for name, field in section.get("properties", {}).items():
            yield name, field
            yield from fields_in(field)


def assert_defaults_change_nothing(data: dict[str, Any]) -> None:
    full = filled(SCHEMA, data)
    jsonschema.validate(full, SCHEMA)
    assert full != data
    assert spec_from_data(full) == spec_from_data(data)


def test_it_accepts_what_the_code_accepts() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for path in (ROOT / "specs").glob("*.json"):
        jsonschema.validate(json.loads(path.read_text()), SCHEMA)
    jsonschema.validate(spec_to_data(spec_from_data(MINIMAL)), SCHEMA)
    jsonschema.validate(changed("model", {"architecture": "raventos", "num_layers": 3}), SCHEMA)
    for key, value in (
        ("task.task_dim", 0),
        ("model.architecture", "gpt"),
        ("model.width", 3),
        ("seeds.init", -1),
        ("run.max_chunk", 0),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed(key, value), SCHEMA)


def test_every_field_and_section_is_described() -> None:
    found = list(fields_in(SCHEMA))
    assert len(found) > 50
    assert all(field["description"] for _, field in found)


def test_every_default_is_accepted() -> None:
    defaults = {name: field for name, field in fields_in(SCHEMA) if "default" in field}
    assert defaults
    for name, field in defaults.items():
        assert jsonschema.Draft202012Validator(field).is_valid(field["default"]), name


def test_a_default_that_depends_on_another_field_is_in_words() -> None:
    words = [field["description"] for name, field in fields_in(SCHEMA) if name == "mlp_dim"]
    assert [text.partition(" Default: ")[2] for text in words[:2]] == ["embed_dim.", "4 embed_dim."]


@pytest.mark.parametrize(
    ("section", "by", "name"),
    [
        *(("model", "architecture", name) for name in ARCHITECTURES),
        *(("training.optimizer", "name", name) for name in OPTIMIZERS),
        ("run", "backend", "cpu"),
        ("run", "wandb", {}),
        ("run", "evaluate_at", {}),
    ],
)
def test_with_its_defaults_put_in_a_spec_stays_the_same(section: str, by: str, name: object) -> None:
    assert_defaults_change_nothing(changed(f"{section}.{by}", name))


@pytest.mark.parametrize("name", FAMILIES)
def test_with_its_defaults_put_in_a_task_stays_the_same(name: str) -> None:
    family: Any = FAMILIES[name]
    required = {field.name: 4 for field in attrs.fields(family) if not has_default(field)}
    assert_defaults_change_nothing(changed("task", {"family": name} | required))


def test_the_committed_one_is_current() -> None:
    committed = json.loads((ROOT / "docs" / "spec.schema.json").read_text())
    assert committed == spec_json_schema(), "run `make docs`"


def test_a_spec_may_name_its_schema() -> None:
    """Editors look for it there; it is no part of the spec or of the name."""
    named = {"$schema": "../docs/spec.schema.json", **MINIMAL}
    assert spec_from_data(named) == spec_from_data(MINIMAL)
    jsonschema.Draft202012Validator(SCHEMA).validate(named)
    for path in (ROOT / "specs").glob("*.json"):
        assert (path.parent / json.loads(path.read_text())["$schema"]).samefile(ROOT / "docs" / "spec.schema.json")
