"""The expansion of a sweep: which runs, in which order, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icl.core.errors import SpecError
from icl.io.sweepfile import describe_values, expand_sweep, load_sweep

BASE: dict[str, Any] = {"task": {"task_dim": 2, "num_examples": 3}, "training": {"total_steps": 5}}
SWEEPS = Path(__file__).parents[2] / "specs" / "sweeps"


def values(data: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(member.values.values()) for member in expand_sweep({"base": BASE, **data}).members]


def faults(data: object) -> str:
    with pytest.raises(SpecError) as caught:
        expand_sweep(data)
    return str(caught.value)


def test_grid_crosses_with_the_last_field_fastest() -> None:
    grid = {"task.num_tasks": [1, None], "seeds.init": [5, 6, 7]}
    assert values({"grid": grid}) == [(1, 5), (1, 6), (1, 7), (None, 5), (None, 6), (None, 7)]


def test_zip_varies_together_and_list_comes_first() -> None:
    data = {
        "list": [{"training.batch_size": 4}, {"training.batch_size": 8}],
        "zip": {"seeds.init": [0, 1], "seeds.sampling": [10, 11]},
        "grid": {"task.num_tasks": [3]},
    }
    assert values(data) == [(4, 0, 10, 3), (4, 1, 11, 3), (8, 0, 10, 3), (8, 1, 11, 3)]


@pytest.mark.parametrize(
    ("given_range", "expected"),
    [
        ({"from": 2, "to": 4}, [2, 3, 4]),
        ({"from": 1, "to": 8, "step": 3}, [1, 4, 7]),
        ({"powers_of": 2, "from": 0, "to": 20}, [2**k for k in range(21)]),
        ({"powers_of": 2, "from": 2, "to": 5, "step": 0.5}, [4, 6, 8, 11, 16, 23, 32]),  # the half-powers of Carroll
    ],
)
def test_ranges(given_range: dict[str, Any], expected: list[int]) -> None:
    """Both ends are included, and a range may stand among values."""
    assert values({"grid": {"task.num_tasks": given_range}}) == [(value,) for value in expected]
    assert values({"grid": {"task.num_tasks": [given_range, None]}}) == [(value,) for value in [*expected, None]]


def test_ranges_of_fractions_have_no_rounding_error_at_the_end() -> None:
    rates = {"training.schedule.learning_rate": {"powers_of": 10, "from": -3, "to": -1}}
    assert values({"grid": rates}) == [(0.001,), (0.01,), (0.1,)]
    steps = {"task.noise_variance": {"from": 0.1, "to": 0.3, "step": 0.1}}
    assert values({"grid": steps}) == [(0.1,), (0.2,), (pytest.approx(0.3),)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6, unique=True), st.integers(1, 5))
def test_the_number_of_runs_is_the_product_and_all_have_names_of_their_own(tasks: list[int], seeds: int) -> None:
    """Field fault 53."""
    data = {"base": BASE, "grid": {"task.num_tasks": tasks, "seeds.init": {"from": 0, "to": seeds - 1}}}
    sweep = expand_sweep(data)
    assert len({member.name for member in sweep.members}) == len(tasks) * seeds
    assert sweep == expand_sweep(json.loads(json.dumps(data)))
    shards = [sweep.shard(index, 3).members for index in range(3)]
    assert sorted(member.name for shard in shards for member in shard) == sorted(m.name for m in sweep.members)


@pytest.mark.parametrize(
    ("file", "number", "first", "last"),
    [
        ("quickstart", 6, "num_tasks=1 init=0", "num_tasks=null init=1"),
        ("raventos-base", 21, "num_tasks=1", "num_tasks=1048576"),
        ("raventos-small", 21, "num_tasks=1", "num_tasks=1048576"),
        ("hoogland-seeds", 11, "init=0 sampling=1000", "init=10 sampling=1010"),
        ("carroll", 31, "num_tasks=1", "num_tasks=null"),
    ],
)
def test_published_sweeps(file: str, number: int, first: str, last: str) -> None:
    members = load_sweep(SWEEPS / f"{file}.json").members
    assert (len(members), describe_values(members[0].values), describe_values(members[-1].values)) == (
        number,
        first,
        last,
    )


def test_a_base_may_be_a_path_and_the_run_half_may_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(json.dumps(BASE))
    (tmp_path / "sweeps").mkdir()
    file = tmp_path / "sweeps" / "both.json"
    file.write_text(json.dumps({"base": "../base.json", "grid": {"seeds.init": [0, 1]}}))
    sweep = load_sweep(file, store="elsewhere")
    assert {member.spec.run.store for member in sweep.members} == {"elsewhere"}
    assert sweep.name.startswith("both-")
    assert sweep.name == load_sweep(file).name, "where it is kept does not rename a sweep"
    file.write_text(json.dumps({"base": "missing.json"}))
    with pytest.raises(SpecError, match=r"missing\.json: got no such file"):
        load_sweep(file)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "sweep: got []; expected an object"),
        ({"base": BASE, "gird": {}}, "gird: got an unknown key; expected one of base, list, zip, grid"),
        ({"grid": {}}, "base: got no object"),
        ({"base": BASE, "list": []}, "list: got []; expected a non-empty list"),
        ({"base": BASE, "grid": {"seeds.init": []}}, "grid.seeds.init: got []; expected a non-empty list of values"),
        ({"base": BASE, "grid": {"seeds.init": 3}}, "grid.seeds.init: got 3; expected a non-empty list of values"),
        ({"base": BASE, "grid": {"seeds.init": {"from": 3, "to": 1}}}, "grid.seeds.init: got the range"),
        ({"base": BASE, "grid": {"seeds.init": {"from": 0}}}, "grid.seeds.init: got the range"),
        ({"base": BASE, "grid": {"seeds.init": {"from": 0, "to": 10**9}}}, "expected at most 100000 values"),
        ({"base": BASE, "grid": {"seeds.init": {"powers_of": 2, "from": 0, "to": 99}}}, "none above 2^64"),
        ({"base": BASE, "zip": {"seeds.init": [1], "seeds.tasks": [1, 2]}}, "zip: got {'seeds.init': 1, "),
        (
            {"base": BASE, "zip": {"seeds.init": [1]}, "grid": {"seeds.init": [2]}},
            "seeds.init: got values in two places",
        ),
        ({"base": BASE, "grid": {"task.num_taks": [1]}}, "Did you mean 'num_tasks'? (In the run num_taks=1.)"),
        ({"base": BASE, "grid": {"task.num_tasks": [1, 0]}}, "task.num_tasks: got 0; expected an integer from 1"),
        ({"base": BASE, "grid": {"seeds.init": [1, 1]}}, "got one experiment twice, as init=1"),
        ({"base": BASE, "grid": {"task.num_tasks": [None, "inf"]}}, "got one experiment twice, as num_tasks=null"),
        ({"base": BASE, "grid": {"run.log_every": [1, 2]}}, "got one experiment twice, as log_every=1"),
        (
            {"base": BASE, "grid": {f"seeds.{seed}": {"from": 1, "to": 999} for seed in ("init", "tasks")}},
            "got 998001 runs; expected at most 100000",
        ),
    ],
)
def test_faults_are_said_with_where_and_what(data: object, said: str) -> None:
    assert said in faults(data)


def test_all_faults_at_once() -> None:
    said = faults({"base": BASE, "list": 3, "grid": {"seeds.init": 3, "seeds.tasks": []}})
    assert said.count("expected") == 3


@pytest.mark.parametrize(
    "given", [{"from": -1e308, "to": 1e308}, {"from": 0, "to": 1e308, "step": 1e-308}, {"from": 0, "to": 10**7}]
)
def test_a_range_of_any_length_is_counted(given: dict[str, Any]) -> None:
    assert "expected at most 100000 values" in faults({"base": BASE, "grid": {"seeds.init": given}})


def test_a_base_may_be_no_path_at_all(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"base": "a\0b"}))
    with pytest.raises(SpecError, match="got embedded null byte"):
        load_sweep(path)
