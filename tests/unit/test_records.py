"""What the documents of a run say, as typed data."""

import attrs
import pytest

from icl.core.rules import Rule
from icl.io import records
from icl.io.errors import CheckpointError
from icl.io.records import Attempt, Complete, Owner, SegmentFile, StepFile, known, structure

STEP_FILE = {"kind": "state", "run": "r", "step": "3", "backend": '{"name": "cpu"}', "tensors_sha256": "0" * 64}


def test_what_is_known_is_typed_and_what_a_later_version_adds_is_passed_over() -> None:
    assert structure(Complete, {"step": 3, "later": [1]}, "f") == Complete(step=3)
    said = structure(StepFile, STEP_FILE, "f")
    assert (said.step, said.backend, said.file) == (3, {"name": "cpu"}, "step-000000000003.safetensors")


def test_every_fault_is_named_with_its_file() -> None:
    with pytest.raises(CheckpointError) as caught:
        structure(Attempt, {"from_step": "3", "command": [1]}, "run/attempts/a.json")
    said = str(caught.value)
    assert said.startswith('run/attempts/a.json: got from_step "3" for an integer from 0')
    assert "command [1] for a list of strings" in said
    assert "no started" in said


@pytest.mark.parametrize("step", ["-1", "3.0", "03", "９", "9" * 13, "9" * 5000, "", 3, None, [3]])
def test_a_step_is_its_decimal_digits(step: object) -> None:
    with pytest.raises(CheckpointError, match=r"step .* for the digits of a step"):
        structure(StepFile, STEP_FILE | {"step": step}, "f")


@pytest.mark.parametrize("names", ["[1]", '["a", "a"]', "{}", "null", "x"])
def test_the_columns_of_a_segment_have_different_names(names: str) -> None:
    with pytest.raises(CheckpointError, match=r"names .* for a list of different strings"):
        structure(SegmentFile, STEP_FILE | {"start": "0", "stop": "1", "names": names}, "f")


def test_a_heartbeat_is_believed_as_far_as_it_makes_sense() -> None:
    assert known(Owner, {"host": "h", "pid": 2**63, "every": True, "token": "x" * 10_000}) == {"host": "h"}


def test_every_field_of_every_record_has_a_rule() -> None:
    classes = [found for found in vars(records).values() if isinstance(found, type) and attrs.has(found)]
    classes = [found for found in classes if found.__module__ == records.__name__]
    assert len(classes) == 6
    for field in (field for found in classes for field in attrs.fields(found)):
        assert isinstance(field.metadata["rule"], Rule), field
