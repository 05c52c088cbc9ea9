"""The XLA backend on PJRT CPU: one program for a whole run, the same bits anywhere, clear errors elsewhere."""

import hashlib
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from icl.backends import get_backend
from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.backend import Backend, Tree, identical
from icl.core.errors import BackendUnavailableError
from icl.core.families.linear import LinearTask
from icl.core.optimizers.adam import Adam
from icl.core.plan import build_plan, plan_chunks
from icl.core.spec import ScheduleSpec, Spec, StepsSpec
from icl.core.step import build_eval, build_train, evaluation_tree, init_state
from icl.core.tasks import EVALUATION_SETS, sample_batches, sample_task_pool
from icl.io.codec import encode_spec, with_run
from icl.loop import execute
from icl.results import load_run
from icl.testing import StrictBackend, tiny_spec, with_training
from tests.contract.test_backends import XLA_WHEELS

pytestmark = pytest.mark.skipif(not XLA_WHEELS, reason="torch_xla has wheels for Linux on x86_64 only")


@pytest.fixture
def backend() -> Backend:
    return get_backend("xla")


def train(spec: Spec, backend: Backend, chunks: list[int]) -> tuple[Tree, list[float]]:
    """The state and losses after chunks of these lengths."""
    pool, step, losses = sample_task_pool(spec), 0, list[float]()
    advance, state = build_train(spec, backend, num_steps=spec.run.max_chunk), backend.to_device(init_state(spec))
    for length in chunks:
        batches = sample_batches(spec, range(step, step + length), pool, spec.run.max_chunk)
        state, metrics = advance(state, backend.to_device(batches), length)
        losses += backend.to_cpu(metrics)["train/loss"][:length].tolist()
        step += length
    return backend.to_cpu(state), losses


def test_every_private_function_is_there() -> None:
    """A new torch_xla that loses one fails here, by name, before anything else does."""
    from icl.backends.xla_program import PRIVATE

    assert all(callable(find()) for find in PRIVATE)


def special_rates() -> list[Spec]:
    """Learning rates that pass through values which torch_xla treats as constants when they are Python numbers."""
    peaks = (0.0, 1e-8, 0.9, 0.999, 0.5, 1.0)
    # Each is a program of its own, so the model is the least that compiles.
    bare = Timaeus(num_layers=1, num_heads=1, embed_dim=4, layer_norm=False, attention_output=False)
    return [
        with_training(
            tiny_spec(model=bare),
            total_steps=9,
            schedule=ScheduleSpec(name="triangle", learning_rate=peak, warmup_fraction=0.5),
        )
        for peak in peaks
    ]


def settled(backend: Backend, executions: float) -> dict[str, float]:
    """The counters once they have that many executions: XLA counts one just after its results can be read."""
    deadline = time.monotonic() + 60
    while (counters := backend.counters())["executions"] < executions and time.monotonic() < deadline:
        time.sleep(0.001)
    return counters


def test_a_long_run_is_one_training_and_one_evaluation_program(backend: Backend, tmp_path: Path) -> None:
    """Field faults 2 to 7: no recompilation, no fallback, no scalar read, whatever the cadence and the rate."""
    spec = with_training(tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=5)), total_steps=2000)
    logs = StepsSpec(log=60, linear=20)
    spec = with_run(spec, checkpoint_at=logs, evaluate_at=logs, backend="xla", max_chunk=16, store=str(tmp_path))
    before = backend.counters()
    outcome = execute(spec)
    (attempt,) = load_run(outcome.store, outcome.run).attempts()
    assert attempt["profile"] == outcome.profile
    assert attempt["status"] == "complete"
    assert outcome.profile["train"]["compilations"] == 1
    assert outcome.profile["evaluate"]["compilations"] == 1
    assert outcome.profile["save"]["compilations"] == 0
    after = backend.counters()
    for name in ("cpu_fallbacks", "scalar_reads"):
        assert after[name] == before[name]
    # An evaluation is two sets. The last execution may be counted after the last phase has ended.
    plan = build_plan(spec)
    expected = len(list(plan_chunks(0, plan.stops(), 16))) + 2 * len(plan.evaluate)
    assert settled(backend, before["executions"] + expected)["executions"] - before["executions"] == expected
    assert sum(phase["executions"] for phase in outcome.profile.values()) in (expected - 1, expected)


def test_a_chunk_is_one_upload_one_execution_and_one_fetch(backend: Backend) -> None:
    spec = tiny_spec()
    advance, state = build_train(spec, backend, num_steps=spec.run.max_chunk), backend.to_device(init_state(spec))
    counted: list[dict[str, float]] = []
    for length in (4, 1, 3, 4, 1, 3, 2, 2):
        batches = sample_batches(spec, range(length), None, spec.run.max_chunk)
        state, metrics = advance(state, backend.to_device(batches), length)
        backend.to_cpu(metrics)
        counted.append(settled(backend, counted[-1]["executions"] + 1 if counted else 0))
    names = ("executions", "transfers_to_device", "transfers_from_device", "compilations")
    steady = [[after[name] - before[name] for name in names] for before, after in pairwise(counted)]
    assert steady[2:5] == [[1, 1, 1, 0]] * 3
    assert steady[-1] == [1, 1, 1, 0]


@pytest.mark.parametrize("spec", special_rates(), ids=lambda spec: str(spec.training.schedule.learning_rate))
def test_special_learning_rates_are_data(spec: Spec, backend: Backend) -> None:
    """Field fault 4: a rate of 0 or 1 as a Python number becomes a constant, and the program another one."""
    advance, state = build_train(spec, backend, num_steps=spec.run.max_chunk), backend.to_device(init_state(spec))
    batches = backend.to_device(sample_batches(spec, range(4), None, 4))
    state, _ = advance(state, batches, 1)
    seen = backend.counters()["compilations"]
    for length in (1, 2, 4):
        state, _ = advance(state, batches, length)
    assert backend.counters()["compilations"] == seen


def digest(tree: Tree) -> str:
    return hashlib.sha256(b"".join(tree[key].numpy().tobytes() for key in sorted(tree))).hexdigest()


def test_data_is_the_same_bytes_everywhere(backend: Backend) -> None:
    spec = tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=5))
    pool = sample_task_pool(spec)
    assert pool is not None
    trees = [sample_batches(spec, range(3), pool), {"pool": pool}]
    trees += [evaluation_tree(spec, name, pool) for name in EVALUATION_SETS]
    for tree in trees:
        digests = {digest(b.to_cpu(b.to_device(tree))) for b in (backend, StrictBackend(), get_backend("cpu"))}
        assert digests == {digest(tree)}


def test_loss_curves_agree_with_the_cpu(backend: Backend) -> None:
    spec = with_training(tiny_spec(), total_steps=300, batch_size=64)
    spec = with_run(spec, max_chunk=50)
    ours = torch.tensor(train(spec, backend, [50] * 6)[1], dtype=torch.float64)
    cpu = torch.tensor(train(spec, get_backend("cpu"), [50] * 6)[1], dtype=torch.float64)
    # Rounding (6e-8) enters each step and Adam's division may amplify it while gradients are small; the gap may grow
    # linearly, so 300 steps allow 300 * 6e-8 = 2e-5, and a factor of 10 for that amplification.
    torch.testing.assert_close(ours, cpu, rtol=2e-4, atol=0)


MODELS = {"timaeus": Timaeus, "raventos": Raventos}


@pytest.mark.parametrize("architecture", MODELS)
def test_any_chunk_plan_gives_the_same_bits(architecture: str, backend: Backend) -> None:
    model = MODELS[architecture](num_heads=2, embed_dim=8)
    spec = with_run(tiny_spec(model=model), max_chunk=8)
    spec = with_training(spec, optimizer=Adam(weight_decay=0.01, max_grad_norm=0.5))
    ends = [train(spec, backend, plan) for plan in ([8, 4], [1] * 12, [3, 3, 3, 3], [2, 8, 1, 1])]
    assert all(identical(state, ends[0][0]) and losses == ends[0][1] for state, losses in ends)


def test_a_fresh_process_and_any_interruption_give_the_same_bits(tmp_path: Path) -> None:
    spec = with_run(tiny_spec(), backend="xla")
    whole = load_run(str(tmp_path / "a"), execute(with_run(spec, store=str(tmp_path / "a"))).run)
    (tmp_path / "spec.json").write_bytes(encode_spec(spec))
    broken = with_run(spec, store=str(tmp_path / "b"))
    countdown = iter([False, True])
    assert execute(broken, should_stop=lambda: next(countdown)).status == "interrupted"
    command = [sys.executable, "-m", "icl.run", str(tmp_path / "spec.json"), "--store", str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["status"] == "complete"
    fresh = load_run(str(tmp_path / "b"), whole.name)
    assert all(identical(fresh.params(step), whole.params(step)) for step in whole.steps)
    assert fresh.metrics().equals(whole.metrics())


def test_a_checkpoint_needs_no_torch_xla(tmp_path: Path) -> None:
    """Field fault 20: loads with torch and safetensors alone; metric names are those of every backend."""
    spec = with_run(tiny_spec(), backend="xla", store=str(tmp_path))
    run = load_run(spec.run.store, execute(spec).run)
    on_cpu = load_run(str(tmp_path / "cpu"), execute(with_run(spec, backend="cpu", store=str(tmp_path / "cpu"))).run)
    assert list(run.metrics().columns) == list(on_cpu.metrics().columns)
    path = tmp_path / run.name / "checkpoints" / f"step-{20:012d}.safetensors"
    script = (
        "import sys; sys.modules['torch_xla'] = None; sys.modules['icl'] = None\n"
        "from safetensors.torch import load_file\n"
        f"tensors = load_file({str(path)!r})\n"
        "assert all(t.device.type == 'cpu' for t in tensors.values())\n"
        "print(sum(t.numel() for t in tensors.values()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == sum(leaf.numel() for leaf in run.params(20).values())


def test_going_on_elsewhere_must_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from icl.run import main

    spec = with_run(tiny_spec(), backend="xla", store=str(tmp_path / "store"))
    assert execute(spec, should_stop=lambda: True).status == "interrupted"
    (tmp_path / "spec.json").write_bytes(encode_spec(spec))
    command = [str(tmp_path / "spec.json"), "--backend", "cpu"]
    assert main(command) == 4
    assert "backend xla -> cpu" in capsys.readouterr().err
    assert main([*command, "--allow-backend-change"]) == 0


def test_evaluation_is_one_fetch_and_no_read(backend: Backend) -> None:
    spec = tiny_spec()
    evaluate, state = build_eval(spec, backend, None), backend.to_device(init_state(spec))
    evaluate(state)
    before = backend.counters()
    evaluate(state)
    after = backend.counters()
    assert after["transfers_from_device"] - before["transfers_from_device"] == 1
    assert after["compilations"] == before["compilations"]
    assert after["scalar_reads"] == before["scalar_reads"]


def test_device_sampling_is_a_function_of_seed_and_step(tmp_path: Path) -> None:
    """Field fault 15, on the device's own generator: whole and interrupted runs draw the same batches."""
    spec = with_training(with_run(tiny_spec(), backend="xla"), sampling="device")
    whole = load_run(str(tmp_path / "a"), execute(with_run(spec, store=str(tmp_path / "a"))).run)
    broken = with_run(spec, store=str(tmp_path / "b"))
    countdown = iter([False, False, True])
    execute(broken, should_stop=lambda: next(countdown, True))
    resumed = load_run(str(tmp_path / "b"), execute(broken).run)
    assert all(identical(resumed.params(step), whole.params(step)) for step in whole.steps)
    assert resumed.metrics().equals(whole.metrics())


def test_a_step_that_cannot_be_a_program_is_refused(backend: Backend) -> None:
    state, batches = backend.to_device({"x": torch.ones(3)}), backend.to_device({"x": torch.ones(2, 3)})
    drawing = backend.compile_steps(
        lambda s, b: ({"x": s["x"] + torch.rand_like(b["x"])}, {"m": b["x"].sum()}), num_steps=2
    )
    with pytest.raises(ValueError, match="draws random numbers"):
        drawing(state, batches, 1)
    growing = backend.compile_steps(lambda s, b: ({"x": torch.cat([s["x"], b["x"]])}, {"m": b["x"].sum()}), num_steps=2)
    with pytest.raises(ValueError, match="Correct the step"):
        growing(state, batches, 1)
    fine = backend.compile_steps(lambda s, b: ({"x": s["x"] + b["x"]}, {"m": b["x"].sum()}), num_steps=2)
    new, metrics = fine(state, batches, 2)
    assert backend.to_cpu(new)["x"].tolist() == [3.0, 3.0, 3.0]
    assert backend.to_cpu(metrics)["m"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("device", "words"),
    [(None, "no TPU chip on this machine"), ("TPU", "set PJRT_DEVICE=CPU"), ("CUDA", "expected TPU or CPU")],
)
def test_without_its_device_it_says_so_and_exits_with_3(device: str | None, words: str, tmp_path: Path) -> None:
    """Field fault 1: never a silent fall back to the processor."""
    (tmp_path / "spec.json").write_bytes(encode_spec(with_run(tiny_spec(), backend="xla")))
    environment = {key: value for key, value in os.environ.items() if key != "PJRT_DEVICE"}
    environment |= {} if device is None else {"PJRT_DEVICE": device}
    command = [sys.executable, "-m", "icl.run", str(tmp_path / "spec.json"), "--store", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 3
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("found", ["0.0.17", None])
def test_another_libtpu_is_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a chip, but not the libtpu that torch_xla was built for; the rest of the environment is this machine's."""
    from torch_xla._internal import tpu

    from icl.backends import xla

    monkeypatch.setattr(tpu, "num_available_chips", lambda: 4)
    monkeypatch.setattr(xla, "_version_of", lambda package: found or "none")
    with pytest.raises(BackendUnavailableError, match=r"got libtpu==.*; expected libtpu==0\.0\.21"):
        xla._require_tpu()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("The TPU is already in use by process with pid 77. Not attempting to load libtpu.so", "End that process"),
        ("Failed to get global TPU topology.", "See docs/tpu.md"),
    ],
)
def test_a_device_that_does_not_open_is_explained(reason: str, words: str) -> None:
    from icl.backends.xla import _open_device

    class Closed:
        def device(self) -> torch.device:
            raise RuntimeError(f"Bad StatusOr access: {reason}")

    with pytest.raises(BackendUnavailableError, match="expected") as caught:
        _open_device(Closed(), "TPU")
    assert words in str(caught.value)
    assert reason in str(caught.value)


def test_without_its_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install -e '\.\[tpu\]' on a TPU VM"):
        get_backend("xla")


def test_a_precision_it_cannot_obey_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match="matmul_precision 'high' on the CPU"):
        get_backend("xla", matmul_precision="high")


def test_compiled_programs_are_kept_apart_by_what_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from icl.backends.xla import cache_folder

    folders = {cache_folder("highest"), cache_folder("high")}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "--some_flag=1")
        folders.add(cache_folder("highest"))
    assert len(folders) == 4


def test_a_trace_is_written(tmp_path: Path) -> None:
    for name in ("xla", "cpu"):
        spec = with_run(tiny_spec(), backend=name, store=str(tmp_path / name))
        execute(spec, trace=str(tmp_path / f"{name}-trace"))
        files = [path for path in (tmp_path / f"{name}-trace").rglob("*") if path.is_file()]
        assert files
        assert all(path.stat().st_size > 0 for path in files)


@pytest.mark.parametrize("home", ["none", "a file"])
def test_programs_are_compiled_anew_where_there_is_no_place_to_keep_them(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache is only a cache: a user without a home, or with a full one, trains all the same."""
    from icl.backends.xla import _initialize_cache

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", "" if home == "none" else str(tmp_path / "file"))
    monkeypatch.setattr("pathlib.Path.home", no_home)
    _initialize_cache("highest")
    assert "no place to keep them" in caplog.text
