"""How many threads a run uses: what is said is what happens, and nothing else changes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from icl.backends import get_backend, threads
from icl.backends.threads import resolve_threads, use_threads
from icl.core.backend import Tree, description_changes, identical
from icl.core.errors import SpecError
from icl.io.codec import encode_spec, spec_from_data, spec_to_data, with_run
from icl.io.names import run_name
from icl.loop import execute
from icl.machine import SPIN_COUNT
from icl.results import load_run, train
from icl.testing import tiny_spec

ROOT = Path(__file__).parents[2]
SAID = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems' PyTorch has another OpenMP, or none")


def in_a_process(code: str, **environment: str) -> dict[str, str]:
    """The JSON that some code prints, run with these variables and none of `SAID`."""
    kept = {key: value for key, value in os.environ.items() if key not in SAID}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=kept | environment, stdout=subprocess.PIPE, check=True, timeout=580)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("environment", "cores", "chosen", "asked", "expected"),
    [
        ({}, 8, 4, None, 4),  # PyTorch takes one a physical core, which the bits of earlier runs depend on
        ({}, 2, 4, None, 2),
        ({"OMP_NUM_THREADS": "4"}, 2, 4, None, 4),
        ({"MKL_NUM_THREADS": "1"}, 2, 1, None, 1),
        ({"OMP_NUM_THREADS": "1"}, 2, 1, 3, 3),
    ],
)
def test_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
    environment: Mapping[str, str],
    cores: int,
    chosen: int,
    asked: int | None,
    expected: int,
) -> None:
    for name in SAID:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "allowed_cores", lambda: cores)
    with use_threads(chosen):
        assert resolve_threads(asked) == expected
        assert get_backend("cpu", threads=asked).describe()["threads"] == str(expected)
        assert torch.get_num_threads() == chosen


_STEPS = """
import json, os
from icl.backends import get_backend
from icl.core.spec import Spec, TrainingSpec
from icl.core.families.linear import LinearTask
from icl.core.architectures import ARCHITECTURES
from icl.core.step import build_train, init_state
from icl.core.tasks import sample_batches
from icl.io.tensors import tensors_digest

asked = os.environ.get("ASKED")
backend = get_backend("cpu", threads=int(asked) if asked else None)
told = {name: backend.describe()[name] for name in ("threads", "kernels")}
for architecture in ("timaeus", "raventos"):
    model = ARCHITECTURES[architecture](num_layers=1)
    training = TrainingSpec(total_steps=100, batch_size=96)
    spec = Spec(task=LinearTask(task_dim=5, num_examples=12), model=model, training=training)
    batches = sample_batches(spec, range(3), None, spec.run.max_chunk)
    state, _ = build_train(spec, backend, num_steps=spec.run.max_chunk)(backend.to_device(init_state(spec)), batches, 3)
    told[architecture] = tensors_digest(state)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, str]]:
    """What processes that differ in variables describe, and the bits they train to."""
    settings: dict[str, dict[str, str]] = {
        "1": {"OMP_NUM_THREADS": "1"},
        "1 asked": {"ASKED": "1", "OMP_NUM_THREADS": "2"},
        "1 by a limit": {"OMP_THREAD_LIMIT": "1"},
        "2 asked": {"ASKED": "2", "OMP_NUM_THREADS": "1"},
        "2 asked, dynamic": {"ASKED": "2", "OMP_DYNAMIC": "true"},
        "2 asked, AVX2 products": {"ASKED": "2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
        "1, compatible products": {"ASKED": "1", "MKL_CBWR": "COMPATIBLE"},
        "1, AVX2 elsewhere": {"ASKED": "1", "ATEN_CPU_CAPABILITY": "avx2"},
    }
    quiet = {"OMP_WAIT_POLICY": "PASSIVE"}
    return {name: in_a_process(_STEPS, **quiet, **variables) for name, variables in settings.items()}


@LINUX
def test_what_is_described_decides_the_bits(told: dict[str, dict[str, str]]) -> None:
    for name, here in told.items():
        for there in told.values():
            same = all(here[key] == there[key] for key in ("timaeus", "raventos"))
            assert same or here["kernels"] != there["kernels"], (name, here, there)
    assert len({here["kernels"] for here in told.values()}) >= 2  # two numbers of threads, on any processor


@LINUX
def test_equal_settings_are_described_alike_whoever_says_them(told: dict[str, dict[str, str]]) -> None:
    assert told["1"] == told["1 asked"] == told["1 by a limit"]
    assert told["2 asked"] == told["2 asked, dynamic"]
    assert (told["1"]["threads"], told["2 asked"]["threads"]) == ("1", "2")


@LINUX
def test_dynamic_threads_are_off_inside_and_put_back() -> None:
    """Alone on a machine OpenMP takes as many threads as asked either way, so its own word is asked."""
    code = """
import ctypes, json, torch
from icl.backends import get_backend
ask, inside = ctypes.CDLL(None).omp_get_dynamic, []
compiled = get_backend("cpu").compile(lambda tree: (inside.append(ask()), tree)[1])
compiled({"x": torch.ones(1)})
print(json.dumps({"inside": str(inside[0]), "after": str(ask())}))
"""
    assert in_a_process(code, OMP_DYNAMIC="true") == {"inside": "0", "after": "1"}


@LINUX
def test_more_threads_than_openmp_gives_are_refused() -> None:
    code = """
import json
from icl.backends import get_backend
try:
    get_backend("cpu", threads=2)
except RuntimeError as error:
    print(json.dumps({"error": str(error)}))
"""
    told = in_a_process(code, OMP_THREAD_LIMIT="1")
    assert "run.threads: got 2 under OMP_THREAD_LIMIT=1; expected at most that many" in told["error"]


@LINUX
def test_the_threads_of_our_own_processes_spin_briefly(tmp_path: Path) -> None:
    """OpenMP itself says what it read when it was loaded, and the manifest what the environment was."""
    spec = tmp_path / "spec.json"
    spec.write_bytes(encode_spec(with_run(tiny_spec(), store=str(tmp_path / "store"))))
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    settings: dict[str, dict[str, str]] = {"unset": {}, "set": {"OMP_WAIT_POLICY": "PASSIVE"}}
    for name, said in settings.items():
        command = [sys.executable, "-m", "icl.run", str(spec), "--store", str(tmp_path / name)]
        told = environment | {"OMP_DISPLAY_ENV": "verbose"} | said
        done = subprocess.run(command, cwd=ROOT, env=told, capture_output=True, text=True, check=True, timeout=580)
        expected = "0" if said else SPIN_COUNT
        assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr) == [expected], done.stderr
        (attempt,) = load_run(str(tmp_path / name), json.loads(done.stdout)["run"]).attempts()
        assert attempt["environment"].get("GOMP_SPINCOUNT", "0") == expected


def test_a_run_uses_the_threads_its_spec_says_everywhere(tmp_path: Path) -> None:
    """Also for the baselines, which no compiled function computes; the caller keeps its own number."""
    ends: list[Tree] = []
    for asked in (1, 2):
        spec = with_run(tiny_spec(), threads=asked, store=str(tmp_path / str(asked)))
        inside: set[int] = set()
        with use_threads(3):
            execute(spec, progress=lambda step, row, seen=inside: seen.add(torch.get_num_threads()))  # type: ignore[misc]
            run = train(spec, progress=False)
            assert torch.get_num_threads() == 3
        assert inside == {asked}
        assert [attempt["backend"]["threads"] for attempt in run.attempts()] == [str(asked)]
        ends.append(run.params(run.steps[0]))
    assert identical(*ends)


def test_the_field_is_part_of_how_and_names_nothing() -> None:
    spec = tiny_spec()
    assert spec.run.threads is None
    assert run_name(with_run(spec, threads=2)) == run_name(spec)
    data = spec_to_data(spec)
    for wrong in (0, 1.0, True, "2", 2000):
        data["run"]["threads"] = wrong
        with pytest.raises(SpecError, match=r"run\.threads: got .*; expected an integer from 1 to 1024, or null"):
            spec_from_data(data)


def test_descriptions_are_compared_by_what_both_name() -> None:
    then = {"backend": "cpu", "instructions": "AVX2", "threads": "2", "torch": "2.9.1"}
    now = {"backend": "cpu", "kernels": "0123abcd", "threads": "1", "torch": "2.13.0"}
    assert description_changes(then, now) == ["threads 2 -> 1", "torch 2.9.1 -> 2.13.0"]
    assert description_changes(then, then) == []
    assert description_changes({}, now) == []


def test_a_forked_process_does_not_hang() -> None:
    """OpenMP's threads are not there after a fork: more than one would be waited for for ever."""
    code = """
import os
from icl.backends.threads import resolve_threads, use_threads
from icl.core.errors import BackendUnavailableError
with use_threads(2):
    pass
assert resolve_threads(2) == 2
child = os.fork()
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert resolve_threads(1) == 1
try:
    resolve_threads(2)
except BackendUnavailableError as error:
    assert "do not survive a fork" in str(error)
    os._exit(0)
os._exit(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
