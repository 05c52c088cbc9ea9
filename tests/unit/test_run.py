"""The command line: exit codes, messages on stderr, one JSON line on stdout, and never a traceback."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from icl.io.codec import load_spec
from icl.io.names import run_name
from icl.io.reference import fields_reference
from icl.io.schema import spec_json_schema
from icl.run import main
from icl.store import main as store_main

GOOD: dict[str, Any] = {
    "task": {"task_dim": 3, "num_examples": 4},
    "model": {"num_heads": 2, "embed_dim": 8},
    "training": {"total_steps": 12, "batch_size": 8},
    "evaluation": {"batch_size": 16},
    "run": {"checkpoint_at": {"linear": 3}, "evaluate_at": {"linear": 3}, "save_state_every": 5, "log_every": 5},
}


@pytest.fixture(autouse=True)
def _signal_handlers() -> Iterator[None]:
    """`main` answers SIGTERM and SIGINT in its own way; put back what was there."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return written(tmp_path, GOOD)


def written(folder: Path, data: dict[str, Any] | str) -> Path:
    path = folder / "spec.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def changed(path: str, value: object) -> dict[str, Any]:
    """GOOD with one value replaced, added, or, for `...`, removed."""
    data: dict[str, Any] = json.loads(json.dumps(GOOD))
    *parents, leaf = path.split(".")
    owner = data
    for parent in parents:
        owner = owner.setdefault(parent, {})
    if value is ...:
        del owner[leaf]
    else:
        owner[leaf] = value
    return data


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


BROKEN: dict[str, tuple[dict[str, Any] | str, list[str]]] = {
    "unknown key": (changed("task.task_dmi", 3), ["task.task_dmi: got an unknown key", "Did you mean 'task_dim'?"]),
    "text for a number": (changed("training.total_steps", "12"), ['training.total_steps: got "12"; expected an int']),
    "a list for an object": (changed("model", [2, 4]), ["model: got [2, 4]; expected an object"]),
    "negative": (
        changed("task.noise_variance", -0.5),
        ["task.noise_variance: got -0.5; expected a finite number >= 0"],
    ),
    "NaN": (changed("training.schedule.learning_rate", float("nan")), ["line 1, column", "not JSON"]),
    "heads that do not divide": (changed("model.num_heads", 3), ["model.num_heads: got 3", "embed_dim=8"]),
    "empty": ("", ["got an empty file"]),
    "not JSON": ("task_dim: 3\n", ["line 1, column 1: got text that is not JSON"]),
    "half a task": (changed("task.num_tasks", 2.5), ["task.num_tasks: got 2.5; expected an integer from 1"]),
    "missing field": (changed("task.num_examples", ...), ["task.num_examples: got nothing", "no default"]),
    "late checkpoint": (changed("run.checkpoint_at.also", [13]), ["run.checkpoint_at.also: got step 13"]),
    "key twice": ('{"task": {}, "task": {}}', ["task: got the key twice"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_spec_is_explained(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, messages = BROKEN[case]
    path = written(tmp_path, data)
    assert main([str(path), "--store", str(tmp_path / "store")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {path}: ")
    assert all(message in err for message in messages), err
    assert "Traceback" not in err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("data", ["[" * 1015 + "]" * 1015, '{"a":' * 1015 + "1" + "}" * 1015], ids=["lists", "objects"])
def test_a_deeply_nested_file_is_explained(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(written(tmp_path, data))]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_store_with_a_nul_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(written(tmp_path, changed("run.store", "a\0b")))]) in (2, 4)
    assert "error: " in capsys.readouterr().err


def test_every_fault_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = changed("task.task_dim", 0)
    data["training"]["batch_size"] = True
    data["runs"] = {}
    assert main([str(written(tmp_path, data))]) == 2
    err = capsys.readouterr().err
    assert all(path in err for path in ("task.task_dim:", "training.batch_size:", "runs:"))


def test_a_directory_or_a_missing_file_is_no_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "absent.json")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "got a directory" in err
    assert "got no such file" in err


@pytest.mark.parametrize("data", [changed("model.num_heads", 3), ""], ids=["heads", "empty"])
def test_a_broken_spec_in_a_process(data: dict[str, Any] | str, tmp_path: Path) -> None:
    result = python("-m", "icl.run", str(written(tmp_path, data)))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {tmp_path}")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["--name"], ["SPEC", "--backend", ""], ["SPEC", "--store", " "], ["SPEC", "--name", "--check"], ["--steps"]],
)
def test_wrong_usage(arguments: list[str], spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main([argument.replace("SPEC", str(spec)) for argument in arguments])
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: " in err


@pytest.mark.parametrize(
    "backend", ["cpuu", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"))]
)
def test_an_unavailable_backend_is_never_replaced(
    backend: str, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(spec), "--backend", backend, "--store", str(tmp_path / "store")]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: backend" in err
    assert "expected" in err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "store", ["FILE", "FILE/inside", "http://localhost:1/runs", "no-such-protocol://runs", "file:///proc/self/runs"]
)
def test_an_unusable_store(store: str, spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert main([str(spec), "--store", store.replace("FILE", str(tmp_path / "file"))]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: " in err
    assert "expected" in err
    assert (tmp_path / "file").read_text() == "not a folder"


def test_an_exploding_loss_says_when_and_leaves_the_store_intact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, store = written(tmp_path, changed("training.schedule", {"name": "constant", "learning_rate": 1e30})), tmp_path
    assert main([str(path), "--store", str(store / "store")]) == 5
    out, err = capsys.readouterr()
    assert out == ""
    assert "update" in err
    assert "learning_rate" in err
    assert store_main(["verify", str(store / "store")]) == 0
    assert ": intact" in capsys.readouterr().out


def test_a_run_ends_with_one_line_and_a_second_one_leaves_it_alone(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "store")
    expected = {"run": run_name(load_spec(spec)), "store": store, "step": 12}
    for status in ("complete", "already_complete"):
        assert main([str(spec), "--store", store]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert json.loads(line) == {**expected, "status": status}


def test_name(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(spec), "--name", "--store", "elsewhere", "--backend", "cuda"]) == 0
    assert capsys.readouterr().out == f"{run_name(load_spec(spec))}\n"


def test_check_prints_a_spec_of_the_same_experiment(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(spec), "--check", "--store", "elsewhere"]) == 0
    out, err = capsys.readouterr()
    resolved = json.loads(out)
    assert resolved["run"]["store"] == "elsewhere"
    assert resolved["model"]["mlp_dim"] == 8
    assert run_name(load_spec(resolved)) == run_name(load_spec(spec))
    assert f"{run_name(load_spec(spec))}: 12 steps, 3 distinct checkpoints" in err


def test_check_says_what_the_run_takes(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(spec), "--check"]) == 0
    told = capsys.readouterr().err
    # 4 bytes for each of 1,012 parameters in three checkpoints, and in two states of three vectors
    assert "\n1,012 parameters; at least " in told
    assert " of memory (" in told
    assert "; 36.4 kB of storage without metrics, of " in told
    assert " that are free\nbackend cpu is known" in told
    assert "warning" not in told


def test_check_refuses_a_backend_that_does_not_exist(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(spec), "--check", "--backend", "cpuu"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    known = "cpu, cuda, xla, or package.module:Class"
    assert err == f"error: backend: got 'cpuu'; expected one of {known}. Correct `run.backend`.\n"


def test_check_warns_of_a_disk_that_is_too_full(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def disk_usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=1000)

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    assert main([str(spec), "--check", "--store", str(tmp_path / "not" / "there")]) == 0
    told = capsys.readouterr().err
    assert asked == [tmp_path]
    assert f"warning: run.store: got 1 kB free in {tmp_path}/not/there; expected 36.4 kB, which" in told
    assert main([str(spec), "--check", "--store", "memory://elsewhere"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_check_refuses_what_the_backend_refuses(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the run would, and without a device."""
    path = written(tmp_path, changed("training.matmul_precision", "high"))
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert main([str(path), "--check", "--backend", backend]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: backend {backend}: got matmul_precision 'high' on the CPU; expected 'highest'")
    if backend == "cpu":
        assert main([str(path), "--store", str(tmp_path / "store")]) == 3
        assert capsys.readouterr().err.endswith(err)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert main([str(path), "--check", "--backend", "cuda"]) == 0
    assert main([str(path), "--check", "--backend", "xla"]) == 0


def test_check_refuses_a_store_that_is_no_place(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(spec), "--check", "--store", "gs:/bucket/runs"]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: store: got 'gs:/bucket/runs'; expected a local path or an fsspec URL.")


@pytest.mark.parametrize("field", ["model.mlp_dim", "training.batch_size", "evaluation.batch_size"])
def test_check_refuses_what_no_machine_can_hold(
    field: str, spec: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("icl.run.allowed_memory", lambda: 2**36)
    assert main([str(spec), "--check", "--set", f"{field}={2**31 - 1}", "--set", "model.embed_dim=64"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: memory: got at least ")
    assert f"Lower {field} (now 2147483647)" in err


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == spec_json_schema()


def test_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fields"]) == 0
    assert capsys.readouterr().out == fields_reference()


@pytest.mark.parametrize("arguments", [["--name"], ["--check"], ["--schema"], ["--fields"]])
def test_what_trains_nothing_imports_no_torch(arguments: list[str], spec: Path) -> None:
    code = (
        "import sys, icl, icl.run; code = icl.run.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    result = python("-c", code, str(spec), *arguments)
    assert result.returncode == 0, result.stderr


def test_a_name_takes_less_than_half_a_second(spec: Path) -> None:
    """At its best of twenty times: others' work can only lengthen one."""
    times = list[float]()
    while min(times, default=1.0) >= 0.5 and len(times) < 20:
        begun = time.perf_counter()
        assert python("-m", "icl.run", str(spec), "--name").returncode == 0
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.5
