"""The notebook surface."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

import icl
from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.metrics import squared_error
from icl.core.model import parameter_shapes, predict
from icl.core.step import init_state
from icl.io.codec import spec_to_data, with_run
from icl.io.errors import CheckpointError, RunOwnedError, StoreError
from icl.testing import tiny_spec, with_training

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


def test_parameters_come_in_one_order_at_every_load(run: icl.Run) -> None:
    """A hash map in safetensors decides at each load; norms of differences, PCA and samplers all read the order."""
    names = list(parameter_shapes(SPEC))
    for _ in range(10):
        assert list(run.params(20)) == names
        assert [name for name, _ in run.model(20).named_parameters()] == names
    vectors = [torch.nn.utils.parameters_to_vector(run.model(20).parameters()) for _ in range(10)]
    assert all(vector.equal(vectors[0]) for vector in vectors)


def test_states_resume_in_one_order(run: icl.Run) -> None:
    """The inputs of a compiled program are in the order of the leaves."""
    for _ in range(10):
        found = run._directory.newest_state()
        assert found is not None
        assert list(found[1]) == list(init_state(SPEC))


def test_batches_come_with_their_tasks(run: icl.Run) -> None:
    table = run.metrics()["train/loss"]
    for step in (0, 10):
        batch = run.training_batch(step)
        assert {key: tuple(leaf.shape) for key, leaf in batch.items()} == {
            "xs": (8, 4, 3),
            "ys": (8, 4, 1),
            "ws": (8, 3),
        }
        loss = squared_error(run.model(step)(batch["xs"], batch["ys"]), batch["ys"])
        assert float(loss.detach()) == pytest.approx(table[step + 1], rel=1e-5)  # float32, views in another place
    assert run.evaluation_batch("true")["ws"].shape == (16, 3)
    for step in (-1, 20):
        with pytest.raises(ValueError, match=r"expected one from 0 to 19"):
            run.training_batch(step)
    drawn_there = attrs.evolve(run, spec=with_training(SPEC, sampling="device"))
    with pytest.raises(ValueError, match=r'sampling="device".*cannot be drawn again'):
        drawn_there.training_batch(0)


def test_a_run_is_shown_in_one_line(run: icl.Run) -> None:
    for shown in (repr(run), repr(icl.list_runs(run._directory.store.url)[0])):
        assert run.name in shown
        assert len(shown) < 200
        assert "\n" not in shown


def test_stores_may_be_paths(tmp_path: Path) -> None:
    made = icl.train(SPEC, store=tmp_path, progress=False)
    assert icl.list_runs(tmp_path)[0].name == made.name
    assert icl.load_run(tmp_path, made.name).steps == made.steps
    assert icl.load_spec({**spec_to_data(SPEC), "run": {"store": tmp_path}}).run.store == str(tmp_path)
    assert icl.load_run(tmp_path, made.name[-16:-8]).name == icl.load_run(tmp_path, "L2H2").name == made.name


def test_columns_are_in_natural_order(tmp_path: Path) -> None:
    """Position 10 after position 9."""
    spec = with_training(tiny_spec(task=LinearTask(task_dim=2, num_examples=11)), total_steps=2)
    columns = list(icl.train(spec, store=tmp_path, progress=False).metrics().columns)
    positions = [int(name.rpartition("/")[2]) for name in columns if name.startswith("true/mse/token/")]
    assert positions == list(range(11))


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
    assert table["true/delta_dmmse"].equals(table["true/delta_ridge"].rename("true/delta_dmmse"))  # M is infinite


def test_metrics_without_pandas_say_what_to_install(run: icl.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"got no pandas; .*pip install -e '\.\[notebook\]'"):
        run.metrics()


def test_what_is_not_there_is_said(run: icl.Run, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected one of the saved steps \(0, 10, 20\)"):
        run.params(5)
    with pytest.raises(StoreError, match="no run 'L3'"):
        icl.load_run(str(run._directory.store.url), "L3")
    with pytest.raises(StoreError, match="no such folder"):
        icl.list_runs(str(tmp_path / "absent"))
    with pytest.raises(AttributeError, match="it has Run, Spec"):
        icl.trian  # noqa: B018


def test_an_interrupt_saves_and_stops_and_training_goes_on_afterwards(run: icl.Run, tmp_path: Path) -> None:
    """Ctrl-C, or a notebook's kernel interrupted, as the documents say of SIGINT."""
    spec = with_run(SPEC, store=str(tmp_path), save_state_every=1000, max_chunk=4)
    before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)

    def interrupt(step: int, row: Mapping[str, float]) -> None:
        if step == 10:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="run it again to go on"):
        icl.train(spec, progress=interrupt)
    (summary,) = icl.list_runs(str(tmp_path))
    assert summary.status == "incomplete"
    assert 10 <= summary.step < 20
    assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)) == before
    assert identical(icl.train(spec).params(20), run.params(20))


def test_an_interrupt_that_comes_too_late_says_that_the_run_is_complete(tmp_path: Path) -> None:
    told = list[int]()

    def interrupt(step: int, row: Mapping[str, float]) -> None:
        if step == 20 and not told:
            told.append(step)
            os.kill(os.getpid(), signal.SIGINT)

    for _ in range(2):  # just complete, and complete already
        told.clear()
        with pytest.raises(KeyboardInterrupt, match=r"^interrupted, and the run is complete$"):
            icl.train(SPEC, store=tmp_path, progress=interrupt)
    assert icl.list_runs(tmp_path)[0].status == "complete"


def test_a_second_interrupt_means_now_also_in_a_progress_function(tmp_path: Path) -> None:
    def interrupt(step: int, row: Mapping[str, float]) -> None:
        told.append(step)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    told: list[int] = []
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        icl.train(SPEC, store=tmp_path, progress=interrupt)
    assert told == [0]
    assert icl.list_runs(tmp_path)[0].step == 0


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt("mine"), SystemExit("mine")])
@pytest.mark.parametrize("at", [0, 4, 20])
def test_what_a_progress_function_raises_comes_after_the_state_is_saved(
    run: icl.Run, error: BaseException, at: int, tmp_path: Path
) -> None:
    spec = with_run(SPEC, store=str(tmp_path), save_state_every=1000, max_chunk=4)

    def fail(step: int, row: Mapping[str, float]) -> None:
        if step >= at:
            raise error

    with pytest.raises(type(error), match=r"^mine$"):
        icl.train(spec, progress=fail)
    (summary,) = icl.list_runs(tmp_path)
    assert at <= summary.step <= at + 4
    assert summary.step > 0
    assert identical(icl.train(spec, progress=False).params(20), run.params(20))


def test_training_a_run_within_itself_or_in_another_thread_is_said(tmp_path: Path) -> None:
    told = []

    def again(step: int, row: Mapping[str, float]) -> None:
        def train() -> None:
            with pytest.raises(RunOwnedError, match=r"got a run that this process trains already; .*icl\.load_run"):
                icl.train(SPEC, store=tmp_path, progress=False)
            told.append(step)

        if step == 10:
            train()
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

    assert icl.train(SPEC, store=tmp_path, progress=again).status == "complete"
    assert told == [10, 10]


def test_importing_icl_imports_nothing_heavy() -> None:
    code = "import icl, sys; print([m for m in ('torch', 'torch_xla', 'wandb', 'gcsfs', 'pandas') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_steps_may_be_numpys_and_are_integers(run: icl.Run) -> None:
    assert identical(run.params(np.int64(20)), run.params(20))
    assert identical(run.training_batch(run.metrics().index[1]), run.training_batch(1))
    for call in (run.params, run.training_batch):
        for wrong in (2.5, "1", None):
            with pytest.raises(ValueError, match=r"got step .*; expected an integer"):
                call(wrong)  # type: ignore[arg-type]


def test_what_is_no_spec_no_name_or_no_progress_is_said(run: icl.Run, tmp_path: Path) -> None:
    assert icl.run_name(spec_to_data(SPEC)) == icl.run_name(SPEC)
    for wrong in (None, 3, run):
        with pytest.raises(icl.SpecError, match="spec: got a value of type"):
            icl.train(wrong)  # type: ignore[arg-type]
    with pytest.raises(icl.SpecError, match="run name: got"):
        icl.load_run(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="progress='no'"):
        icl.train(SPEC, store=tmp_path, progress="no")  # type: ignore[arg-type]
