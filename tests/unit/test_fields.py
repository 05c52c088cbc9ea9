"""Every field of every section says what it means, and what its default and null mean."""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from icl.core.architectures import ARCHITECTURES
from icl.core.families import FAMILIES
from icl.core.fields import default_data, has_default, is_leaf, may_be_null, sections_of
from icl.core.optimizers import OPTIMIZERS
from icl.core.spec import Spec, StepsSpec


def fields_below(cls: type) -> "Iterator[tuple[str, attrs.Attribute[Any]]]":
    """Every field of every section, those of all tables included."""
    for field in attrs.fields(cls):
        yield f"{cls.__name__}.{field.name}", field
        for section in sections_of(field):
            yield from fields_below(section)


FIELDS = dict(fields_below(Spec))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_says_what_it_means(name: str) -> None:
    assert "help" in FIELDS[name].metadata, 'add metadata={"help": "..."} to the field'
    words = FIELDS[name].metadata["help"]
    assert words.endswith(".")
    assert words == " ".join(words.split())
    assert "|" not in words  # which ends a cell of a table


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_may_be_null_says_what_null_means(name: str) -> None:
    field = FIELDS[name]
    accepts_null = field.validator.accepts(None) if is_leaf(field) else may_be_null(field)  # type: ignore[union-attr]
    assert accepts_null == ("null" in field.metadata["help"])


@pytest.mark.parametrize("name", FIELDS)
def test_a_default_is_data_or_said_in_words(name: str) -> None:
    field = FIELDS[name]
    computed = isinstance(field.default, attrs.Factory)  # type: ignore[arg-type]
    assert computed == ("default" in field.metadata)


@pytest.mark.parametrize("cls", [*FAMILIES.values(), *ARCHITECTURES.values(), *OPTIMIZERS.values()])
def test_a_default_in_words_is_true(cls: Any) -> None:
    """The words are a field, or a number and a field: "4 embed_dim"."""
    section = cls(**{field.name: 4 for field in attrs.fields(cls) if not has_default(field)})
    for field in (field for field in attrs.fields(cls) if "default" in field.metadata):
        factor, _, other = field.metadata["default"].rpartition(" ")
        assert getattr(section, field.name) == getattr(section, other) * int(factor or 1)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if "one_of" in field.metadata])
def test_a_section_of_a_table_says_what_it_is(name: str) -> None:
    table, by = (FIELDS[name].metadata[key] for key in ("one_of", "by"))
    for choice, cls in table.items():
        assert cls.__doc__
        assert attrs.fields_dict(cls)[by].default == choice


def test_the_default_of_a_section_is_what_differs_from_its_own() -> None:
    assert default_data(FIELDS["Spec.model"]) == {}
    assert default_data(FIELDS["RunSpec.checkpoint_at"]) == {"log": 50, "linear": 50}
    assert default_data(FIELDS["RunSpec.wandb"]) is None
    assert default_data(FIELDS["Adam.betas"]) == [0.9, 0.999]
    assert default_data(FIELDS["StepsSpec.also"]) == list(StepsSpec().also)
