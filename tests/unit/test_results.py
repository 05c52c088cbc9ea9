"""The notebook surface."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import icl
from icl.core.backend import identical
from icl.core.model import predict
from icl.io.errors import CheckpointError, StoreError
from icl.testing import tiny_spec

SPEC = tiny_spec()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> icl.Run:
    return icl.train(SPEC, store=str(tmp_path_factory.mktemp("store")))


def test_a_run_can_be_opened_again(run: icl.Run) -> None:
    store = str(run._directory.store.url)
    again = icl.load_run(store, run.name)
    assert again.name == icl.run_name(SPEC)
    assert again.spec.task == SPEC.task
    assert [summary.name for summary in icl.list_runs(store)] == [run.name]
    assert icl.list_runs(store)[0].step == 20


def test_the_model_is_predict_exactly(run: icl.Run) -> None:
    batch = run.evaluation_batch("pretrain")
    model = run.model(20)
    assert torch.equal(model(batch["xs"], batch["ys"]), predict(SPEC.model, run.params(20), batch["xs"], batch["ys"]))
    assert identical(dict(model.state_dict()), run.params(20))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_reading_leaves_the_saved_run_alone(run: icl.Run) -> None:
    """Earlier trainers, fault 13: what a reader is given is a copy."""
    before = run.params(20)
    with torch.no_grad():
        for parameter in run.model(20).parameters():
            parameter.zero_()
    run.params(20)["unembedding.weight"].zero_()
    assert identical(run.params(20), before)


def test_metrics_are_a_table_by_step(run: icl.Run) -> None:
    table = run.metrics()
    assert table.index.name == "step"
    assert {"train/loss", "pretrain/mse", "true/delta_ridge", "true/delta_ridge/token/3"} <= set(table.columns)
    assert not any("dmmse" in column for column in table.columns)


def test_metrics_without_pandas_say_what_to_install(run: icl.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"got no pandas; .*pip install -e '\.\[notebook\]'"):
        run.metrics()


def test_what_is_not_there_is_said(run: icl.Run, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected one of the saved steps \(0, 10, 20\)"):
        run.params(5)
    with pytest.raises(StoreError, match="no run 'L2'"):
        icl.load_run(str(run._directory.store.url), "L2")
    with pytest.raises(StoreError, match="no such folder"):
        icl.list_runs(str(tmp_path / "absent"))
    with pytest.raises(AttributeError, match="it has Run, Spec"):
        icl.trian  # noqa: B018


def test_importing_icl_imports_nothing_heavy() -> None:
    code = "import icl, sys; print([m for m in ('torch', 'torch_xla', 'wandb', 'gcsfs', 'pandas') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
