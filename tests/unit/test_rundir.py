"""A run's directory: what is kept, what is refused, and what `verify` and the command line find."""

import logging
import shutil
from pathlib import Path

import attrs
import orjson
import pytest
import torch

from icl import store as store_command
from icl.core.architectures.timaeus import Timaeus
from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.metrics import TRAINING_LOSS
from icl.core.model import parameter_shapes
from icl.core.spec import RunSpec, SeedsSpec, Spec, TrainingSpec
from icl.io.codec import encode_spec
from icl.io.errors import CheckpointError, StoreError
from icl.io.manifest import list_runs
from icl.io.rundir import RunDir, open_run, read_run
from icl.io.states import run_states
from icl.io.store import open_store
from icl.io.verify import verify_run
from icl.testing import with_training
from tests.trees import METADATA, params, state

SPEC = Spec(
    task=LinearTask(task_dim=2, num_examples=2),
    model=Timaeus(num_layers=1, num_heads=1, embed_dim=4),
    training=TrainingSpec(total_steps=4),
)


@pytest.fixture
def run(store_url: str) -> RunDir:
    return open_run(open_store(store_url), SPEC)


def path_of(run: RunDir, folder: str, step: int) -> str:
    return f"{run.name}/{folder}/step-{step:012d}.safetensors"


def replace(run: RunDir, path: str, data: bytes) -> None:
    run.store.delete(path)
    run.store.create(path, data)


def damage(run: RunDir, path: str) -> None:
    replace(run, path, run.store.read(path)[:-1])


def finish(run: RunDir) -> None:
    """What a whole run of SPEC leaves."""
    run.manifest.record_attempt({"from_step": 0, "started": "2026-01-01T00:00:00+00:00"})
    run.save_checkpoint(0, params(SPEC, 0.0), METADATA)
    for start, stop in ((0, 2), (2, 4)):
        rows = {stop: {"true/mse": 1.0 / stop}}
        run.save_segment(start, stop, torch.arange(start, stop, dtype=torch.float32), rows, METADATA)
        run.save_state(stop, state(SPEC, stop), METADATA)
    run.save_checkpoint(4, params(SPEC, 4.0), METADATA)
    run.manifest.mark_complete({"step": 4})


def test_a_spec_is_published_once_and_its_how_half_may_change(run: RunDir) -> None:
    again = open_run(run.store, attrs.evolve(SPEC, run=RunSpec(log_every=7)))
    assert again == run
    assert read_run(run.store, run.name)[1] == SPEC


@pytest.mark.parametrize(
    "data", [encode_spec(attrs.evolve(SPEC, seeds=SeedsSpec(init=9))), b"{}", b"", b"\xff\x00", b"[1]"]
)
def test_a_directory_with_another_spec_is_foreign(run: RunDir, data: bytes) -> None:
    """Earlier trainers, fault 5: two experiments never share a directory."""
    replace(run, f"{run.name}/spec.json", data)
    for opened in (lambda: open_run(run.store, SPEC), lambda: read_run(run.store, run.name)):
        with pytest.raises(CheckpointError, match=r"(?s)spec\.json: got .* foreign"):
            opened()


def test_checkpoints_return_by_step_in_numerical_order(store_url: str) -> None:
    run = open_run(open_store(store_url), with_training(SPEC, total_steps=100))
    for step in (100, 9, 10):
        run.save_checkpoint(step, params(SPEC, step), METADATA)
    assert run.checkpoint_steps() == [9, 10, 100]
    assert identical(run.load_checkpoint(10), params(SPEC, 10))


def test_parameters_come_in_the_order_of_the_model(run: RunDir) -> None:
    run.save_checkpoint(3, params(SPEC, 3), METADATA)
    assert list(run.load_checkpoint(3)) == list(parameter_shapes(SPEC))


def test_a_step_that_was_not_saved_lists_those_that_were(run: RunDir) -> None:
    run.save_checkpoint(3, params(SPEC, 3), METADATA)
    with pytest.raises(CheckpointError, match=r"step-000000000004.*saved steps \(3\)"):
        run.load_checkpoint(4)


def test_a_renamed_or_copied_file_is_refused(run: RunDir) -> None:
    """Neither another step, another kind, nor another run is taken for this one."""
    run.save_checkpoint(3, params(SPEC, 3), METADATA)
    run.save_state(3, state(SPEC, 3), METADATA)
    other = open_run(run.store, attrs.evolve(SPEC, seeds=SeedsSpec(init=9)))
    run.store.create(path_of(run, "checkpoints", 4), run.store.read(path_of(run, "checkpoints", 3)))
    run.store.create(path_of(run, "checkpoints", 5), run.store.read(path_of(run, "state", 3)))
    other.store.create(path_of(other, "checkpoints", 3), run.store.read(path_of(run, "checkpoints", 3)))
    for directory, step in ((run, 4), (run, 5), (other, 3)):
        with pytest.raises(CheckpointError, match="moved or renamed"):
            directory.load_checkpoint(step)


def test_the_newest_of_10100_steps_is_found_by_number(tmp_path: Path) -> None:
    """Fault 75 and earlier trainers, fault 6: no page limit, and 9 < 10 < 100."""
    run = open_run(open_store(str(tmp_path)), SPEC)
    folder = tmp_path / run.name / "checkpoints"
    folder.mkdir()
    for step in range(10_100):
        (folder / f"step-{step:012d}.safetensors").touch()
    assert run.checkpoint_steps() == list(range(10_100))


def test_saving_again_and_again_never_writes_one_name_twice(run: RunDir) -> None:
    """Fault 70: every save has a name of its own, so no object is ever updated."""
    before: dict[str, bytes] = {}
    for step in range(1, 51):
        run.save_checkpoint(step, params(SPEC, step), METADATA)
        for name in before:
            assert run.store.read(f"{run.name}/checkpoints/{name}") == before[name]
        before = {
            name: run.store.read(f"{run.name}/checkpoints/{name}") for name in run.store.list(f"{run.name}/checkpoints")
        }
    assert len(before) == 50


def test_the_newest_two_states_are_kept(run: RunDir) -> None:
    for step in (1, 2, 3):
        run.save_state(step, state(SPEC, step), METADATA)
    assert run.state_steps() == [2, 3]
    found = run.newest_state()
    assert found is not None
    assert (found[0], found[2]["backend"]) == (3, METADATA["backend"])


def test_no_state_is_none(run: RunDir) -> None:
    assert run.newest_state() is None


def test_a_good_state_is_not_pruned_in_favour_of_a_damaged_one(run: RunDir) -> None:
    for step in (1, 2):
        run.save_state(step, state(SPEC, step), METADATA)
    damage(run, path_of(run, "state", 2))
    run.save_state(3, state(SPEC, 3), METADATA)
    assert run.state_steps() == [1, 2, 3]
    run.save_state(4, state(SPEC, 4), METADATA)
    assert run.state_steps() == [3, 4]


def test_resuming_passes_over_damaged_states_and_says_which(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 45: the newest intact state wins, and the damaged file is named."""
    for step in (1, 2):
        run.save_state(step, state(SPEC, step), METADATA)
    damage(run, path_of(run, "state", 2))
    with caplog.at_level(logging.WARNING, "icl"):
        found = run.newest_state()
    assert found is not None
    assert found[0] == 1
    assert path_of(run, "state", 2) in caplog.text


def test_every_step_has_one_row(run: RunDir) -> None:
    """A killed attempt's segments overlap those of the one that resumed; agreeing ones are one."""
    finish(run)
    run.save_segment(1, 3, torch.tensor([1.0, 2.0]), {2: {"true/mse": 0.5}}, METADATA)
    assert run.metrics() == {
        1: {TRAINING_LOSS: 0.0},
        2: {TRAINING_LOSS: 1.0, "true/mse": 0.5},
        3: {TRAINING_LOSS: 2.0},
        4: {TRAINING_LOSS: 3.0, "true/mse": 0.25},
    }


def test_overlapping_segments_that_disagree_are_both_named(run: RunDir) -> None:
    run.save_segment(0, 2, torch.tensor([1.0, 2.0]), {}, METADATA)
    run.save_segment(1, 3, torch.tensor([2.5, 3.0]), {}, METADATA)
    with pytest.raises(CheckpointError, match=r"001-000000000003-.* at step 2; .*000-000000000002-"):
        run.metrics()


def test_rows_agree_or_differ_by_their_bits(run: RunDir) -> None:
    for start in (0, 1):
        rows = {2: {"true/mse": float("nan")}}
        run.save_segment(start, start + 2, torch.ones(2), rows, METADATA)
    assert str(run.metrics()[2]["true/mse"]) == "nan"
    run.save_segment(2, 3, torch.ones(1), {3: {"zero": 0.0}}, METADATA)
    run.save_segment(2, 4, torch.ones(2), {3: {"zero": -0.0}}, METADATA)
    with pytest.raises(CheckpointError, match=r"zero = -0\.0 at step 3"):
        run.metrics()


def test_going_on_elsewhere_puts_aside_what_lies_beyond_and_destroys_nothing(run: RunDir) -> None:
    finish(run)
    before = {run.store.read(path_of(run, "checkpoints", 4)), run.store.read(path_of(run, "state", 4))}
    run.set_aside_beyond(2)
    assert (run.checkpoint_steps(), run.state_steps(), max(run.metrics())) == ([0], [2], 2)
    aside = {run.store.read(f"{run.name}/superseded/{name}") for name in run.store.list(f"{run.name}/superseded")}
    assert before <= aside
    assert len(aside) == 3


def test_a_whole_run_verifies(run: RunDir) -> None:
    finish(run)
    assert list(verify_run(run)) == []
    assert run.manifest.status() == "complete"
    (summary,) = list_runs(run.store)
    assert (summary.name, summary.status, summary.step) == (run.name, "complete", 4)


@pytest.mark.parametrize("folder", ["checkpoints", "state", "metrics", "attempts", "spec.json", "complete.json"])
def test_verify_names_a_damaged_file(run: RunDir, folder: str) -> None:
    finish(run)
    inside = f"{run.name}/{folder}"
    path = inside if folder.endswith(".json") else f"{inside}/{run.store.list(inside)[0]}"
    damage(run, path)
    assert any(path in fault for fault in verify_run(run))


def test_verify_finds_strays_gaps_and_what_a_complete_run_lacks(run: RunDir) -> None:
    finish(run)
    run.store.create(f"{run.name}/notes.txt", b"")
    run.store.create(f"{run.name}/checkpoints/notes.txt", b"")
    assert sorted(fault.split(": ")[0] for fault in verify_run(run)) == sorted(
        [f"{run.name}/notes.txt", f"{run.name}/checkpoints/notes.txt"]
    )
    run.store.delete(f"{run.name}/notes.txt")
    run.store.delete(f"{run.name}/checkpoints/notes.txt")
    run.store.delete(path_of(run, "checkpoints", 0))
    run.store.delete(f"{run.name}/metrics/{run.store.list(f'{run.name}/metrics')[0]}")
    missing, gap = verify_run(run)
    assert path_of(run, "checkpoints", 0) in missing
    assert "no segment from step 0" in gap


@pytest.mark.parametrize("folder", ["attempts", "checkpoints", "state", "metrics", "owner", "superseded"])
@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_verify_names_what_should_be_a_folder(tmp_path: Path, folder: str, kind: str) -> None:
    """A listing of it is empty, as that of a folder that is not there."""
    run = open_run(open_store(str(tmp_path)), SPEC)
    finish(run)
    path = tmp_path / run.name / folder
    shutil.rmtree(path, ignore_errors=True)
    path.write_bytes(b"") if kind == "file" else path.symlink_to("nowhere")
    assert any(f"{run.name}/{folder}: got what is no folder" in fault for fault in verify_run(run))


def test_a_run_that_has_lost_its_spec_is_found_and_said(
    run: RunDir, store_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    finish(run)
    run.store.delete(f"{run.name}/spec.json")
    run.store.create("notes/readme.txt", b"")
    for command in (["ls", store_url], ["verify", store_url], ["show", store_url, run.name]):
        assert store_command.main(command) == (0 if command[0] == "ls" else 4)
        out, err = capfd.readouterr()
        assert run.name in out + err
        assert "notes" not in out
        if command[0] == "show":
            assert f"{run.name}/spec.json: got nothing; expected the spec of this run" in err
    open_run(run.store, SPEC)
    assert store_command.main(["verify", store_url]) == 0


def test_a_listing_believes_no_damaged_document(run: RunDir) -> None:
    finish(run)
    damage(run, f"{run.name}/complete.json")
    (summary,) = list_runs(run.store)
    (state,) = run_states(run.store, [(run.name, SPEC)])
    assert (summary.status, state.status) == ("incomplete", "stopped")


def test_a_run_that_is_not_there_lists_those_that_are(run: RunDir) -> None:
    with pytest.raises(StoreError, match=run.name):
        read_run(run.store, "absent")


def test_the_command_lists_and_shows(run: RunDir, store_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    finish(run)
    assert store_command.main(["ls", store_url]) == 0
    assert capfd.readouterr().out.split() == [run.name, "complete", "4"]
    assert store_command.main(["ls", "--json", store_url]) == 0
    assert orjson.loads(capfd.readouterr().out) == {"run": run.name, "status": "complete", "step": 4}
    assert store_command.main(["show", store_url, run.name]) == 0
    assert orjson.loads(capfd.readouterr().out)["checkpoints"] == [0, 4]


def test_the_command_verifies_every_run_past_a_damaged_one(
    run: RunDir, store_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    finish(run)
    assert store_command.main(["verify", store_url]) == 0
    capfd.readouterr()
    other = open_run(run.store, attrs.evolve(SPEC, seeds=SeedsSpec(init=9)))
    for each in (run, other):
        damage(run, f"{each.name}/spec.json")
    assert store_command.main(["verify", store_url]) == 4
    out = capfd.readouterr().out
    assert f"{run.name}/spec.json" in out
    assert f"{other.name}/spec.json" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["ls", "nosuch://x"], 4, "expected a local path or"),
        (["ls", "{tmp}/absent"], 4, "no such folder"),
        (["show", "{tmp}", "absent"], 4, "expected one of those there (none)"),
        (["verify", "{tmp}", "absent"], 4, "expected one of those there (none)"),
        (["verify", "{tmp}", "../up"], 2, "run name: got '../up'"),
    ],
)
def test_a_users_mistake_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert store_command.main([part.format(tmp=tmp_path) for part in arguments]) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_wrong_usage_exits_with_2() -> None:
    with pytest.raises(SystemExit) as exit_info:
        store_command.main(["frobnicate"])
    assert exit_info.value.code == 2
