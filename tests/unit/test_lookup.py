"""Which run is meant by the beginning of a name, and the order in which runs are listed."""

from pathlib import Path

import pytest

from icl.core.errors import SpecError
from icl.core.families.linear import LinearTask
from icl.core.spec import EvaluationSpec, SeedsSpec, Spec
from icl.io.errors import StoreError
from icl.io.lookup import find_run
from icl.io.manifest import list_runs
from icl.io.names import natural_order, run_name
from icl.io.rundir import open_run
from icl.io.store import Store, open_store
from icl.store import main
from icl.testing import tiny_spec

TASKS = (4, 16, 100, None)


def spec_of(num_tasks: int | None, seed: int = 0) -> Spec:
    task = LinearTask(task_dim=3, num_examples=4, num_tasks=num_tasks)
    return tiny_spec(task=task, seeds=SeedsSpec(init=seed), evaluation=EvaluationSpec(batch_size=4))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path))
    for spec in (*(spec_of(m) for m in TASKS), spec_of(4, seed=2), spec_of(4, seed=10)):
        open_run(store, spec)
    return store


def test_runs_are_listed_by_size(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    expected = [run_name(s) for s in (spec_of(4), spec_of(4, 2), spec_of(4, 10), *(spec_of(m) for m in TASKS[1:]))]
    assert [run.name for run in list_runs(store)] == expected
    assert main(["ls", store.url]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == expected


def test_natural_order() -> None:
    names = ["L2H4-M4-s2-a1", "L2H4-M4-s10-a1", "L2H4-M16-s0-a1", "L2H4-Minf-s0-9f", "L10H4-M1-s0-a1"]
    assert sorted(sorted(names), key=natural_order) == names != sorted(names)
    anything = ["", "1", "a", "a1b2", "inf", "-Minf", "M1", "train/loss", "x/token/9", "x/token/10"]
    assert sorted(anything, key=natural_order)[-2:] == ["x/token/9", "x/token/10"]


def test_the_beginning_of_a_name_or_of_its_hash_is_enough(store: Store) -> None:
    for spec in (spec_of(16), spec_of(None), spec_of(4, seed=10)):
        name = run_name(spec)
        beginning, _, digest = name.rpartition("-")
        for text in (name, beginning, f"{beginning}-", name[:-1], digest, digest[:8]):
            assert find_run(store, text) == name


def test_more_than_one_run_is_told_which(store: Store) -> None:
    with pytest.raises(StoreError) as caught:
        find_run(store, "L2H2-M4-")
    message = str(caught.value)
    assert "got 'L2H2-M4-', with which 3 runs begin" in message
    assert all(run_name(spec_of(4, seed)) in message for seed in (0, 2, 10))
    assert run_name(spec_of(16)) not in message
    with pytest.raises(StoreError, match=r"with which 6 runs begin"):
        find_run(store, "L2H2")


def test_a_name_that_is_not_there_is_told_the_nearest(store: Store, tmp_path: Path) -> None:
    for seed in range(20, 40):
        open_run(store, spec_of(100, seed))
    meant = run_name(spec_of(None))
    with pytest.raises(StoreError) as caught:
        find_run(store, meant.replace("L2H2", "L2H4"))
    message = str(caught.value)
    assert f"({meant}, " in message
    assert "and 18 more" in message
    with pytest.raises(StoreError, match=r"expected one of those there \(none\)"):
        find_run(open_store(str(tmp_path / "empty")), "L2H2")


@pytest.mark.parametrize("text", ["", "..", "a/b", "-"])
def test_what_no_name_begins_with(store: Store, text: str) -> None:
    with pytest.raises(SpecError, match="run name"):
        find_run(store, text)


def test_a_folder_that_is_no_run_is_not_found(store: Store) -> None:
    store.create("L9-notes/readme.txt", b"")
    with pytest.raises(StoreError, match="got no run 'L9'"):
        find_run(store, "L9")


@pytest.mark.parametrize("command", ["show", "verify"])
def test_the_command_line_takes_a_beginning(store: Store, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, store.url, "L2H2-Minf"]) == 0
    assert run_name(spec_of(None)) in capsys.readouterr().out
    assert main([command, store.url, "L2H2-M4"]) == 4
    assert "with which 3 runs begin" in capsys.readouterr().err
