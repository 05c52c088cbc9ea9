"""A run is the same whatever the process has set, and leaves what it has set."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from icl.backends.numerics import pinned_numerics
from icl.core.backend import Tree, identical
from icl.core.families.linear import LinearTask
from icl.core.spec import Spec
from icl.io.codec import with_run
from icl.io.rundir import read_run
from icl.io.store import open_store
from icl.io.verify import verify_run
from icl.loop import execute
from icl.results import Run, load_run, train
from icl.testing import hostile_settings, process_settings, tiny_spec
from tests.unit.test_loop import stop_after

SPEC = with_run(tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=5)), threads=1)


def all_of(run: Run) -> Tree:
    """Everything that a notebook reads of a run, as one tree."""
    pool, step = run.task_pool(), run.steps[-1]
    assert pool is not None
    values = torch.from_numpy(run.metrics().to_numpy(copy=True))
    batch = {f"batch.{name}": leaf for name, leaf in run.evaluation_batch("pretrain").items()}
    model = {f"model.{name}": leaf.detach() for name, leaf in run.model(step).named_parameters()}
    return {"pool": pool, "metrics": values, **batch, **model, **run.params(step)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(SPEC, store=str(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("older", [False, True], ids=["fp32_precision", "float32_matmul_precision"])
def test_a_run_does_not_depend_on_what_the_process_has_set(plain: Run, tmp_path: Path, older: bool) -> None:
    with hostile_settings(older=older):
        before = process_settings()
        execute(with_run(SPEC, store=str(tmp_path)), should_stop=stop_after(2))
        run = train(SPEC, store=str(tmp_path))
        read, read_again = all_of(run), all_of(load_run(plain._directory.store.url, plain.name))
        assert process_settings() == before
    assert identical(read, all_of(plain))
    assert identical(read_again, all_of(plain))
    assert list(verify_run(read_run(open_store(str(tmp_path)), run.name)[0])) == []
    assert not any(leaf.is_inference() for name, leaf in read.items() if name != "metrics")  # which pandas keeps


@contextmanager
def precision_of_all(value: str) -> Iterator[None]:
    """`torch.backends.fp32_precision`, which the kinds of device take where they have none of their own."""
    kinds = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined, unused-ignore]
    for kind in kinds:
        kind.fp32_precision = "none"
    torch.backends.fp32_precision = value  # type: ignore[attr-defined, unused-ignore]
    try:
        yield
    finally:
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined, unused-ignore]
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("value", ["tf32", "bf16", "ieee", "none"])
def test_a_precision_for_all_devices_does_not_count_and_still_holds_afterwards(value: str) -> None:
    with precision_of_all(value):
        before = process_settings()
        with pinned_numerics():
            inside = process_settings()
            assert torch.get_float32_matmul_precision() == "highest"
        assert process_settings() == before
        torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined, unused-ignore]
        after = process_settings()
    assert {inside["cuda"], inside["mkldnn"]} <= {"ieee", "none"}
    assert (after["cuda"], after["mkldnn"]) == ("ieee", "ieee")


def test_plain_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs in two threads of a notebook would put each other's settings back."""
    for name in (
        "set_default_dtype",
        "set_num_threads",
        "use_deterministic_algorithms",
        "set_float32_matmul_precision",
    ):
        monkeypatch.setattr(torch, name, None)
    with pinned_numerics(threads=torch.get_num_threads()):
        pass


def test_it_warns_of_more_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("icl.loop.allowed_cores", lambda: 1)
    with caplog.at_level(logging.WARNING, logger="icl"):
        execute(with_run(SPEC, store=str(tmp_path)), should_stop=stop_after(1))
        assert not caplog.records
        execute(with_run(SPEC, store=str(tmp_path / "more"), threads=2), should_stop=stop_after(1))
    assert "2 share the 1 cores" in caplog.text


def slow_down(monkeypatch: pytest.MonkeyPatch, readings: list[tuple[int, float]]) -> None:
    class Slow:
        def add(self, num_steps: int, seconds: float) -> tuple[float, float] | None:
            readings.append((num_steps, seconds))
            return (0.5, 0.01) if len(readings) == 2 else None

    monkeypatch.setattr("icl.effects.Slowdown", Slow)


def test_a_slow_run_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    readings: list[tuple[int, float]] = []
    slow_down(monkeypatch, readings)
    spec: Spec = with_run(SPEC, store=str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="icl"):
        execute(spec)
    assert sum(steps for steps, _ in readings) == SPEC.training.total_steps
    assert all(seconds > 0 for _, seconds in readings)
    (record,) = caplog.records
    assert "steps take 500 ms, and took 10" in record.getMessage()
    assert "OMP_WAIT_POLICY=PASSIVE" in record.getMessage()
    assert "`run.threads`" in record.getMessage()
