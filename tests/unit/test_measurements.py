"""Evaluation as named measurements: other comparisons, rarer ones, and rows that hold fewer names."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from icl.backends.cpu import CPUBackend
from icl.core.families.linear import LinearTask
from icl.core.measurements import TARGETS, Measurement, grouped, squared_gaps, standard_measurements
from icl.core.metrics import TRAINING_LOSS
from icl.core.model import init_params, predict
from icl.core.step import build_eval, init_state
from icl.core.tasks import sample_evaluation_batch, sample_task_pool
from icl.io.contents import require_contents
from icl.io.errors import CheckpointError
from icl.io.records import SegmentFile
from icl.io.rundir import open_run
from icl.io.store import open_store
from icl.testing import tiny_spec
from tests.trees import METADATA

SPEC = tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=5))


def absolute_gaps(ys_pred: Tensor, references: Tensor, weights: Tensor) -> Tensor:
    return ((ys_pred[None, ..., 0] - references).abs() * weights[None, :, None]).sum(1)


def every_tenth(step: int) -> bool:
    return step % 10 == 0


RARE = Measurement("mae", "y", TARGETS, absolute_gaps, every_tenth)


def test_the_standard_ones_say_what_they_are() -> None:
    found = [(each.name, each.unit, each.needs) for each in standard_measurements(SPEC.task)]
    assert found == [("mse", "y^2", "targets"), ("delta_ridge", "y^2", "ridge"), ("delta_dmmse", "y^2", "dmmse")]
    infinite = LinearTask(task_dim=3, num_examples=4)
    assert [each.name for each in standard_measurements(infinite)] == ["mse", "delta_ridge"]
    assert grouped((*standard_measurements(SPEC.task), RARE))[1:] == [[RARE]]


def test_another_comparison_that_is_due_more_rarely() -> None:
    measured, pool = (RARE, *standard_measurements(SPEC.task)), sample_task_pool(SPEC)
    evaluate = build_eval(SPEC, CPUBackend(), pool, measured)
    plain = build_eval(SPEC, CPUBackend(), pool)(init_state(SPEC))
    assert evaluate(init_state(SPEC), 7) == plain  # bit for bit what it is without the other
    row = evaluate(init_state(SPEC), 20)
    assert row == evaluate(init_state(SPEC))
    batch = sample_evaluation_batch(SPEC, "true", pool)
    gap = (predict(SPEC.model, init_params(SPEC), batch["xs"], batch["ys"]) - batch["ys"]).abs()
    # Float32 sums of 16 terms against float64.
    assert row["true/mae/token/2"] == pytest.approx(float(gap[:, 2].double().mean()), rel=1e-6)
    assert row["true/mae"] == pytest.approx(float(gap.double().mean()), rel=1e-6)
    assert build_eval(SPEC, CPUBackend(), pool, (RARE,))(init_state(SPEC), 7) == {}


def test_a_weight_of_zero_does_not_count() -> None:
    ys_pred, references = torch.randn(5, 4, 1), torch.randn(2, 5, 4)
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    whole = squared_gaps(ys_pred[:3], references[:, :3], weights[:3])
    torch.testing.assert_close(squared_gaps(ys_pred, references, weights), whole)


def test_rows_with_fewer_names_are_saved_and_read(tmp_path: Path) -> None:
    run = open_run(open_store(str(tmp_path)), SPEC)
    rows = {0: {"a": 1.0, "b": float("nan")}, 1: {"a": 2.0}}
    run.save_segment(0, 2, torch.tensor([0.5, 0.25]), rows, METADATA)
    found = run.metrics()
    assert found[1] == {"a": 2.0, TRAINING_LOSS: 0.5}
    assert found[0].keys() == {"a", "b"}
    run.save_segment(0, 1, torch.tensor([0.5]), {1: {"b": 3.0}}, METADATA)
    assert run.metrics()[1] == {"a": 2.0, "b": 3.0, TRAINING_LOSS: 0.5}


def test_rows_with_all_names_are_saved_as_before(tmp_path: Path) -> None:
    """No tensor more, so that other versions read the file and equal rows give equal bytes."""
    run = open_run(open_store(str(tmp_path)), SPEC)
    run.save_segment(0, 1, torch.tensor([0.5]), {0: {"a": 1.0}, 1: {"a": 2.0}}, METADATA)
    ((path, _, _),) = run.segments()
    assert run.load("metrics", path)[0].keys() == {TRAINING_LOSS, "steps", "values"}


def test_what_says_which_are_measured_has_the_shape_of_the_values() -> None:
    said = SegmentFile(
        kind="segment", run="r", start="0", stop="1", names='["a"]', backend="{}", tensors_sha256="0" * 64
    )
    tensors = {
        TRAINING_LOSS: torch.zeros(1),
        "steps": torch.tensor([1]),
        "values": torch.zeros(1, 1, dtype=torch.float64),
        "measured": torch.zeros(1, 1, dtype=torch.bool),
    }
    require_contents(SPEC, said, tensors, "f")
    with pytest.raises(CheckpointError, match=r"measured bool \(2,\) for bool \(1, 1\)"):
        require_contents(SPEC, said, {**tensors, "measured": torch.zeros(2, dtype=torch.bool)}, "f")
