"""Export and import: the earlier trainers' own names, shapes and files, and back bit for bit."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from icl import store as store_command
from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.model import init_params, parameter_shapes
from icl.core.spec import EvaluationSpec, RunSpec, Spec, StepsSpec, TrainingSpec
from icl.io.errors import CheckpointError
from icl.io.formats import FORMATS, decode_params, encode_params
from icl.results import Run, list_runs, load_run, train
from tests.golden.references import NAMES, load_reference

TASK = LinearTask(task_dim=3, num_examples=4)
TIMAEUS = Timaeus(num_layers=2, num_heads=2, embed_dim=8)
RAVENTOS = Raventos(num_layers=2, num_heads=2, embed_dim=8)
MODELS = [
    TIMAEUS,
    attrs.evolve(TIMAEUS, layer_norm=False),
    attrs.evolve(TIMAEUS, attention_output=False, mlp_dim=5),
    attrs.evolve(TIMAEUS, layer_norm=False, attention_output=False, num_heads=1),
    RAVENTOS,
]


def spec_of(model: Timaeus) -> Spec:
    return Spec(
        task=TASK,
        model=model,
        training=TrainingSpec(total_steps=4, batch_size=4),
        evaluation=EvaluationSpec(batch_size=4),
        run=RunSpec(checkpoint_at=StepsSpec(also=(1, 3)), evaluate_at=StepsSpec(), heartbeat_seconds=None),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_state_comes_back_bit_for_bit(name: str) -> None:
    """Every name, shape, dtype and bit that the reference implementation saved, masks included."""
    reference = load_reference(name)
    kind = FORMATS[reference.spec.model.architecture]
    written = kind.read(encode_params(kind, reference.spec, reference.params))
    theirs = {key: torch.as_tensor(value) for key, value in written.items()}
    assert identical(theirs, reference.state)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_parameters_come_back_bit_for_bit(model: Timaeus) -> None:
    spec, kind = spec_of(model), FORMATS[model.architecture]
    params = {name: torch.randn(shape) for name, shape in parameter_shapes(spec).items()}
    params["unembedding.weight"][0, 0] = float("nan")
    assert identical(decode_params(kind, spec, encode_params(kind, spec, params), "f"), params)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_files_and_trees_are_in_one_order(model: Timaeus) -> None:
    """That of `parameter_shapes`, whatever the order of what is handed over; masks come last."""
    spec, kind = spec_of(model), FORMATS[model.architecture]
    params, theirs = init_params(spec), {entry.ours: entry.theirs for entry in kind.entries(spec.model)}
    expected = [theirs[name] for name in parameter_shapes(spec)] + list(kind.buffers(spec))
    data = encode_params(kind, spec, dict(reversed(params.items())))
    assert list(kind.read(data)) == expected
    shuffled = kind.write(dict(reversed([(k, torch.as_tensor(v)) for k, v in kind.read(data).items()])))
    assert list(decode_params(kind, spec, shuffled, "f")) == list(parameter_shapes(spec))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


def torch_file(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def array_file(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def deflated(data: bytes) -> bytes:
    """The same archive with a hundred megabytes of zeros in a hundred kilobytes."""
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.npy", bytes(10**8))
    return buffer.getvalue()


@pytest.mark.parametrize("model", [TIMAEUS, RAVENTOS], ids=lambda model: model.architecture)
def test_what_is_not_exactly_this_architecture_is_refused(model: Timaeus, tmp_path: Path) -> None:
    spec, kind = spec_of(model), FORMATS[model.architecture]
    good = encode_params(kind, spec, init_params(spec))
    state = {name: torch.as_tensor(value) for name, value in kind.read(good).items()}
    name = next(iter(state))
    marker = tmp_path / "executed"
    wrong: dict[str, tuple[bytes, str]] = {
        "missing": (kind.write({k: v for k, v in state.items() if k != name}), f"no {name}"),
        "extra": (kind.write({**state, "stray": torch.zeros(1)}), "an unknown stray"),
        "shape": (kind.write({**state, name: torch.zeros(2, 2)}), rf"{name} \('float32', \(2, 2\)\) for"),
        "dtype": (kind.write({**state, name: state[name].double()}), "float64"),
        "pickle": (pickle.dumps(Bomb(marker)), "It is damaged or foreign"),
        "bomb": (deflated(good), r"an archive of \d+ bytes for at most"),
        "cut": (good[:-10], "It is damaged or foreign"),
        "empty": (b"", "It is damaged or foreign"),
    }
    if model.architecture == "timaeus":
        wrong["code"] = (torch_file({**state, name: Bomb(marker)}), "It was not executed")
        wrong["list"] = (torch_file([1]), "list for a state dict")
        wrong["numbers"] = (torch_file(dict.fromkeys(state, 1)), "It is damaged or foreign")
        masked = {key: torch.zeros_like(value) if "mask" in key else value for key, value in state.items()}
        wrong["mask"] = (kind.write(masked), "another .*causal_mask")
    else:
        wrong["objects"] = (array_file(**{name: np.array([Bomb(marker)], dtype=object)}), "It is damaged or foreign")
    for data, message in wrong.values():
        with pytest.raises(CheckpointError, match=message):
            decode_params(kind, spec, data, "f")
    assert not marker.exists()


def test_the_original_trainers_own_file_is_read() -> None:
    """It holds the optimiser and the scheduler beside the model."""
    spec, kind = spec_of(TIMAEUS), FORMATS["timaeus"]
    params = init_params(spec)
    state = dict(kind.read(encode_params(kind, spec, params)))
    data = torch_file({"model": state, "optimizer": {}, "scheduler": {"last_epoch": 3}})
    assert identical(decode_params(kind, spec, data, "f"), params)


def test_the_original_trainers_own_file_may_hold_the_moments_of_a_large_model() -> None:
    spec, kind = spec_of(attrs.evolve(TIMAEUS, embed_dim=128, mlp_dim=1024)), FORMATS["timaeus"]
    params = init_params(spec)
    state = dict(kind.read(encode_params(kind, spec, params)))
    optimizer = torch.optim.Adam([torch.nn.Parameter(value.clone()) for value in params.values()])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    data = torch_file({"model": state, "optimizer": optimizer.state_dict(), "scheduler": {"last_epoch": 3}})
    assert identical(decode_params(kind, spec, data, "f"), params)


@pytest.fixture(params=[TIMAEUS, RAVENTOS], ids=["timaeus", "raventos"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return train(spec_of(request.param), store=str(tmp_path / "store"))


def command(*arguments: object) -> int:
    return store_command.main([str(argument) for argument in arguments])


def test_checkpoints_leave_and_come_back(run: Run, store_url: str, tmp_path: Path) -> None:
    form = run.spec.model.architecture
    exported = f"{store_url}/exported"
    for _ in range(2):  # again is no fault
        assert command("export", tmp_path / "store", run.name, exported, "--format", form) == 0
        assert command("import", tmp_path / "back", f"{exported}/{run.name}") == 0
    back = load_run(str(tmp_path / "back"), run.name)
    assert (back.steps, back.status) == (run.steps, "incomplete")
    assert [summary.step for summary in list_runs(tmp_path / "back")] == [run.steps[-1]]
    assert all(identical(back.params(step), run.params(step)) for step in run.steps)
    assert command("verify", tmp_path / "back") == 0
    again = train(run.spec, store=str(tmp_path / "back"))  # what is there is what training makes
    assert again.status == "complete"


def test_a_whole_run_leaves_and_comes_back(run: Run, store_url: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert command("export", tmp_path / "store", run.name, f"{store_url}/copy") == 0
        assert command("import", tmp_path / "back", f"{store_url}/copy/{run.name}") == 0
    for root in (f"{store_url}/copy", str(tmp_path / "back")):
        copy = load_run(root, run.name)
        assert (copy.status, copy.steps) == ("complete", run.steps)
        assert copy.metrics().equals(run.metrics())
        assert copy.attempts() == run.attempts()
        assert command("verify", root) == 0


def test_one_step_may_be_chosen(run: Run, tmp_path: Path) -> None:
    form = run.spec.model.architecture
    assert command("export", tmp_path / "store", run.name, tmp_path / "out", "--format", form, "--step", 3) == 0
    assert sorted(path.stem for path in (tmp_path / "out" / run.name).iterdir()) == ["spec", "step-000000000003"]


def test_mistakes_are_one_line(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    form = run.spec.model.architecture
    other = "raventos" if form == "timaeus" else "timaeus"
    out = tmp_path / "out"
    assert command("export", tmp_path / "store", run.name, out, "--format", form) == 0
    folder = out / run.name
    checkpoint = sorted(folder.glob("step-*"))[0]
    capfd.readouterr()
    mistakes: list[tuple[list[object], int, str]] = [
        (["export", tmp_path / "store", run.name, out, "--format", other], 2, f"expected icl or {form}"),
        (["export", tmp_path / "store", run.name, out, "--step", 1], 2, "copies the whole run"),
        (["export", tmp_path / "store", run.name, out, "--format", form, "--step", 2], 4, "saved steps (0, 1, 3, 4)"),
        (["export", tmp_path / "store", "absent", out], 4, "got no run 'absent'"),
        (["import", tmp_path / "back", tmp_path / "absent"], 4, "no such folder"),
        (["import", tmp_path / "back", out], 4, "got no spec.json"),
    ]
    for arguments, code, message in mistakes:
        assert command(*arguments) == code
        assert message in capfd.readouterr().err
    checkpoint.write_bytes(sorted(folder.glob("step-*"))[1].read_bytes())
    assert command("export", tmp_path / "store", run.name, out, "--format", form) == 4
    assert "got other contents" in capfd.readouterr().err
    assert command("import", tmp_path / "store", folder) == 4  # step 0 with the bits of step 1
    told = f"{checkpoint}: got other parameters than {tmp_path}/store/{run.name} has at step 0;"
    assert told in capfd.readouterr().err
    checkpoint.unlink()
    checkpoint.with_stem("step-5").write_bytes(b"")
    assert command("import", tmp_path / "back", folder) == 4
    assert "got step 5; expected at most total_steps=4" in capfd.readouterr().err
    assert command("verify", tmp_path / "store") == 0


def test_a_damaged_run_is_not_copied(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = sorted((tmp_path / "store" / run.name / "checkpoints").iterdir())[0]
    target.write_bytes(target.read_bytes()[:-1])
    assert command("export", tmp_path / "store", run.name, tmp_path / "out") == 4
    assert "expected an intact run" in capfd.readouterr().err
    assert not (tmp_path / "out" / run.name).exists()


def test_a_missing_checkpoint_of_a_complete_run_is_a_gap(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store" / run.name / "checkpoints" / "step-000000000003.safetensors").unlink()
    assert command("verify", tmp_path / "store") == 4
    assert "step-000000000003.safetensors: got nothing; expected it in a complete run" in capfd.readouterr().out
