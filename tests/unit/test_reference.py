"""docs/spec.md lists every field, as the code has it."""

import re
from pathlib import Path

import attrs

from icl.core.fields import sections_of
from icl.core.spec import Spec
from icl.io.reference import fields_reference

PAGE = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()


def test_the_committed_page_is_current() -> None:
    assert PAGE.partition("\n## Fields\n")[2] == fields_reference(), "run `make docs`"


def paths_of(cls: type, path: str = "", by: str = "") -> set[str]:
    own = {path + field.name for field in attrs.fields(cls) if field.name != by}
    for field in attrs.fields(cls):
        for section in sections_of(field):
            own |= paths_of(section, f"{path}{field.name}.", field.metadata.get("by", ""))
    return own


def test_every_field_has_a_row_and_every_row_is_four_cells() -> None:
    rows = [line for line in fields_reference().splitlines() if line.startswith("| `")]
    assert all(len(row.split(" | ")) == 4 for row in rows)
    assert {path for row in rows for path in re.findall(r"`([\w.]+)`", row.split(" | ")[0])} == paths_of(Spec)


def test_each_choice_of_a_table_has_a_heading() -> None:
    headings = [line for line in fields_reference().splitlines() if line.startswith("### ")]
    for place, by, table in (
        ("task", "family", attrs.fields(Spec).task.metadata["one_of"]),
        ("model", "architecture", attrs.fields(Spec).model.metadata["one_of"]),
    ):
        assert [f'### `{place}` with `"{by}": "{name}"`' for name in table] == [
            line for line in headings if line.startswith(f"### `{place}`")
        ]


def test_what_a_choice_shares_with_the_one_above_is_said_once() -> None:
    rows = [line for line in fields_reference().splitlines() if line.startswith("| `")]
    assert len(set(rows)) == len(rows)
    assert "`num_layers`, `num_heads`, `embed_dim`: as above.\n" in fields_reference()
