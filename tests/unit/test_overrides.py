"""Fields set from outside, in the spellings of command lines and of W&B."""

import json
from pathlib import Path
from typing import Any

import pytest

from icl.core.errors import SpecError
from icl.io.overrides import assigned, parse_assignments, read_parameters
from icl.run import main

BASE: dict[str, Any] = {"task": {"task_dim": 2, "num_examples": 3}, "training": {"total_steps": 5}}


def test_assignments_are_json_or_text() -> None:
    texts = ["task.num_tasks=8", "task.num_tasks=null", "run.backend=xla", 'seeds={"init": 1}', "run.store=a=b"]
    assert parse_assignments(texts) == {
        "task.num_tasks": None,
        "run.backend": "xla",
        "seeds": {"init": 1},
        "run.store": "a=b",
    }
    for text in ("task.num_tasks", "=3"):
        with pytest.raises(SpecError, match="expected FIELD=VALUE"):
            parse_assignments([text])


@pytest.mark.parametrize(
    "parameters",
    [
        {"task": {"num_tasks": 4}, "seeds": {"init": 2}},
        {"task.num_tasks": 4, "seeds.init": 2},
        {"task/num_tasks": 4, "seeds/init": "2"},
        {"task": {"num_tasks": 4}, "seeds.init": 2, "_wandb": {"x": 1}, "wandb_version": 1},
    ],
)
def test_every_spelling_is_one_run(
    parameters: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Field faults 49 and 52: nested, dotted and slashed keys, and those that W&B adds."""
    spec, given = tmp_path / "spec.json", tmp_path / "args.json"
    spec.write_text(json.dumps(assigned(BASE, {"task.num_tasks": 4, "seeds.init": 2})))
    assert main([str(spec), "--name"]) == 0
    expected = capfd.readouterr().out
    spec.write_text(json.dumps(BASE))
    given.write_text(json.dumps(parameters))
    assert main([str(spec), "--set-from", str(given), "--name"]) == 0
    assert capfd.readouterr().out == expected
    assert main([str(spec), "--set", "task.num_tasks=4", "--set", "seeds.init=2", "--name"]) == 0
    assert capfd.readouterr().out == expected


def test_a_number_that_yaml_took_for_text_is_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Field fault 54."""
    spec, given, names = tmp_path / "spec.json", tmp_path / "args.json", set()
    spec.write_text(json.dumps(BASE))
    for rate in (0.001, "1e-3", "0.001", "1.0e-03"):
        given.write_text(json.dumps({"training": {"schedule": {"learning_rate": rate}}}))
        assert main([str(spec), "--set-from", str(given), "--name"]) == 0
        names.add(capfd.readouterr().out)
    assert len(names) == 1
    given.write_text(json.dumps({"training": {"schedule": {"learning_rate": "abc"}}}))
    assert main([str(spec), "--set-from", str(given), "--name"]) == 2
    assert 'training.schedule.learning_rate: got "abc"; expected a finite number' in capfd.readouterr().err


def test_a_field_in_two_spellings_is_refused() -> None:
    with pytest.raises(SpecError, match=r"task\.num_tasks: got it in two spellings"):
        read_parameters({"task": {"num_tasks": 4}, "task.num_tasks": 4})
    with pytest.raises(SpecError, match="expected an object"):
        read_parameters([1])
