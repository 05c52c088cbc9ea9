"""Reading specs: strict, all faults at once, one clear message each."""

import json
import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.errors import SpecError
from icl.core.families.linear import LinearTask
from icl.io.codec import decode_spec, encode_spec, load_spec, spec_from_data, spec_to_data, with_run
from icl.io.names import run_name

MINIMAL: dict[str, Any] = {"task": {"task_dim": 4, "num_examples": 8}, "training": {"total_steps": 10}}


def changed(path: str, value: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(MINIMAL))
    *parents, leaf = path.split(".")
    owner = data
    for parent in parents:
        owner = owner.setdefault(parent, {})
    owner[leaf] = value
    return data


def faults(data: object) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        spec_from_data(data)
    return caught.value.faults


def test_only_three_fields_have_no_default() -> None:
    spec = spec_from_data(MINIMAL)
    assert spec_from_data(spec_to_data(spec)) == spec
    assert len(faults({"task": {}, "training": {}})) == 3


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("task.task_dim", 3.7, "got 3.7; expected an integer"),
        ("task.task_dim", 4.0, "got 4.0; expected an integer"),
        ("task.task_dim", True, "got true; expected an integer"),
        ("task.task_dim", "8", 'got "8"; expected an integer'),
        ("task.task_dim", None, "got null; expected an integer"),
        ("task.task_dim", -1, "got -1; expected an integer from 1"),
        ("task.num_tasks", 2.5, "expected an integer from 1 to 2147483647, or null"),
        ("task.num_tasks", 0, "or null"),
        ("task.num_tasks", -1, "or null"),
        ("task.num_tasks", math.nan, "or null"),
        ("task.noise_variance", -0.1, "expected a finite number >= 0"),
        ("task.noise_variance", math.inf, "expected a finite number >= 0"),
        ("task.noise_variance", "0.1", "expected a finite number >= 0"),
        ("model.num_heads", 3, "expected a divisor of embed_dim=64"),
        ("model.architecture", "gpt", 'expected one of "timaeus", "raventos"'),
        ("task.family", "quadratic", 'expected one of "linear"'),
        ("task.family", ["linear"], 'got ["linear"]; expected one of "linear"'),
        ("training.optimizer.name", None, 'got null; expected one of "adam"'),
        ("model.layer_norm", 1, "expected true or false"),
        ("training.optimizer.betas", [0.9], "expected a list of 2 times"),
        ("training.optimizer.betas", [0.9, 1], "< 1"),
        ("training.optimizer.eps", 0, "> 0"),
        ("training.schedule.warmup_fraction", 1.5, "<= 1"),
        ("seeds.init", 2**64, "expected an integer from 0 to 18446744073709551615"),
        ("run.max_chunk", 5000, "from 1 to 4096"),
        ("run.wandb", 3, "expected an object with the keys project, entity, group, mode"),
        ("run.wandb", {"mode": "later"}, 'run.wandb.mode: got "later"; expected one of "online", "offline"'),
        ("run.checkpoint_at.also", [11], "expected at most training.total_steps=10"),
        ("run", 5, "expected an object"),
        ("schema", 2, "expected an integer from 1 to 1"),
    ],
)
def test_one_fault_is_one_message_with_its_path(path: str, value: Any, words: str) -> None:
    (fault,) = faults(changed(path, value))
    assert fault.startswith(f"{path}")
    assert words in fault


def test_raventos_always_has_layer_norm_and_output() -> None:
    data = changed(
        "model", {"architecture": "raventos", "layer_norm": False, "attention_output": False, "num_heads": 5}
    )
    assert [fault.split(":")[0] for fault in faults(data)] == [
        "model.num_heads",
        "model.layer_norm",
        "model.attention_output",
    ]


def test_a_section_is_the_class_that_its_table_names() -> None:
    spec = spec_from_data(changed("model", {"architecture": "raventos"}))
    assert spec.model == Raventos()
    assert spec_from_data(MINIMAL).model == Timaeus()
    assert spec_from_data(spec_to_data(spec)) == spec
    assert spec_to_data(spec)["task"]["family"] == "linear"


def test_all_faults_are_reported_at_once_with_the_nearest_key() -> None:
    data = {"task": {"task_dim": "4", "num_exmples": 8}, "training": {"total_steps": 0}, "modl": {}}
    found = "\n".join(faults(data))
    assert "task.task_dim: got" in found
    assert "task.num_examples: got nothing" not in found  # the misspelt key is one fault, not two
    assert "task.num_exmples: got an unknown key" in found
    assert "Did you mean 'num_examples'?" in found
    assert "training.total_steps: got 0" in found
    assert "Did you mean 'model'?" in found


@pytest.mark.parametrize("spelling", [None, "inf", "Infinity", math.inf])
def test_infinite_task_diversity_has_one_name(spelling: Any) -> None:
    """Field fault 78."""
    assert run_name(spec_from_data(changed("task.num_tasks", spelling))) == run_name(spec_from_data(MINIMAL))
    encoded = encode_spec(spec_from_data(changed("task.num_tasks", spelling)))

    def refuse(text: str) -> None:
        raise AssertionError(text)

    assert json.loads(encoded, parse_constant=refuse)["task"]["num_tasks"] is None


def test_numbers_have_one_spelling() -> None:
    """Field fault 54: 1e-3, 0.001 and integers in place of floats hash alike; text is refused by the core."""
    assert decode_spec(
        b'{"task":{"task_dim":4,"num_examples":8,"noise_variance":1},"training":{"total_steps":10}}'
    ) == (spec_from_data(changed("task.noise_variance", 1.0)))
    zero, minus = (encode_spec(spec_from_data(changed("task.noise_variance", value))) for value in (0.0, -0.0))
    assert zero == minus
    assert faults(changed("training.schedule.learning_rate", "1e-3"))


NUMPY: dict[str, Any] = {
    "task.task_dim": np.int64(4),
    "task.num_examples": np.uint8(8),
    "task.num_tasks": np.int32(16),
    "task.noise_variance": np.float64(0.25),
    "model.architecture": np.array(["raventos"])[0],
    "model.layer_norm": np.bool_(True),
    "model.mlp_dim": np.array(32),
    "training.schedule.learning_rate": np.geomspace(1e-3, 1e-2, 2)[0],
    "training.optimizer.betas": np.array([0.5, 0.75]),
    "training.optimizer.max_grad_norm": np.float32(0.5),
    "run.checkpoint_at.also": [np.int64(1), 2],
    "run.evaluate_at.also": np.arange(3),
}


def test_numpys_numbers_are_numbers() -> None:
    """At the one edge where they come in: what is inside is Python's, so that names and files are the same."""
    data, plain_data = changed("task.task_dim", 4), changed("task.task_dim", 4)
    for path, value in NUMPY.items():
        *parents, leaf = path.split(".")
        for root, given in ((data, value), (plain_data, value.tolist() if hasattr(value, "tolist") else [1, 2])):
            owner = root
            for parent in parents:
                owner = owner.setdefault(parent, {})
            owner[leaf] = given
    assert encode_spec(spec_from_data(data)) == encode_spec(spec_from_data(plain_data))
    made = LinearTask(task_dim=np.int64(4), num_examples=8, noise_variance=np.float64(0.1))
    assert made == LinearTask(task_dim=4, num_examples=8, noise_variance=0.1)
    assert [type(value) for value in (made.task_dim, made.noise_variance)] == [int, float]
    assert attrs.evolve(made, num_tasks=np.float64("inf")).num_tasks is None


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("task.task_dim", np.float64(8.0), "got 8.0; expected an integer"),
        ("task.task_dim", np.int64(0), "got 0; expected an integer from 1"),
        ("task.task_dim", np.bool_(True), "got true; expected an integer"),
        ("task.task_dim", np.array([4]), r"got [4]; expected an integer"),
        ("task.task_dim", np.array([[4]]), "got a value of type ndarray; expected an integer"),
        ("task.task_dim", torch.tensor(4), "got a value of type Tensor; expected an integer"),
        ("task.noise_variance", np.float64("nan"), "got NaN; expected a finite number"),
        ("task.noise_variance", np.float64(-1), "got -1.0; expected a finite number"),
        ("task.noise_variance", np.complex64(1), "expected a finite number"),
        ("model.layer_norm", np.int64(1), "got 1; expected true or false"),
        ("training.optimizer.betas", np.array([0.5]), "got [0.5]; expected a list of 2 times"),
        ("run.checkpoint_at.also", np.array([1.0, 2.0]), "got [1.0, 2.0]; expected a list of an integer"),
    ],
)
def test_numpys_numbers_are_judged_like_pythons(path: str, value: Any, words: str) -> None:
    (fault,) = faults(changed(path, value))
    assert fault.startswith(path)
    assert words in fault


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an empty file"),
        (b"  \n", "an empty file"),
        (b"{'a': 1}", "line 1, column 2: got text that is not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "expected an object with the keys"),
        (b'{"task": {"task_dim": 1, "task_dim": 2}}', "task_dim: got the key twice"),
        (b'{"training": 1e999}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_files_that_are_not_specs(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "spec.json"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="got a directory"):
        load_spec(tmp_path)
    with pytest.raises(SpecError, match="got no such file"):
        load_spec(tmp_path / "absent.json")
    with pytest.raises(SpecError, match="got embedded null byte; expected a readable JSON file"):
        load_spec("a\0b")


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(SpecError, match="/dev/zero: got more than 67108864 bytes; expected a JSON file"):
        load_spec("/dev/zero")


def test_run_options_never_rename_a_run() -> None:
    spec = spec_from_data(MINIMAL)
    other = with_run(spec, backend="cuda", store="memory://x")
    assert (other.run.backend, other.run.store) == ("cuda", "memory://x")
    assert run_name(other) == run_name(spec)
    with pytest.raises(SpecError, match=r"run\.store"):
        with_run(spec, store="")
