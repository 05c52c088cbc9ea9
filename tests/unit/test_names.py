"""Run names: golden, unique, and blind to how a spec is written."""

import os
import subprocess
import sys
from pathlib import Path

import attrs
import orjson
import pytest

from icl.core.errors import SpecError
from icl.core.spec import Experiment, SeedsSpec
from icl.io.codec import encode_spec, load_spec, with_run
from icl.io.names import OMITTED_AT_DEFAULT, check_run_name, hashed_bytes, run_name
from icl.testing import tiny_spec, with_training

SPECS = Path(__file__).parents[2] / "specs"

# These names are in papers and in stores: a change here orphans every run made before.
GOLDEN = {
    "quickstart": "L2H4-Minf-s0-d3df9c5129fe3fef",
    "hoogland-L2H4Minf": "L2H4-Minf-s0-40b4b98e01f66fe4",
    "raventos-base": "L8H2-M32768-s0-72dd88b8ee45492a",
    "raventos-small": "L4H2-M4096-s0-2fbeb9e71232866c",
    "carroll-M16": "L2H4-M16-s0-92b9a576d91611fd",
}


@pytest.mark.parametrize("spec", sorted(GOLDEN))
def test_golden_names(spec: str) -> None:
    assert run_name(load_spec(SPECS / f"{spec}.json")) == GOLDEN[spec]


def test_an_experiment_has_the_name_of_every_spec_that_runs_it() -> None:
    spec = tiny_spec()
    alone = spec.experiment
    assert type(alone) is Experiment
    assert not hasattr(alone, "run")
    assert alone.experiment == alone == with_run(spec, store="elsewhere").experiment
    assert run_name(alone) == run_name(spec)
    whole = orjson.loads(encode_spec(spec))
    del whole["run"]
    assert orjson.loads(encode_spec(alone)) == whole


def test_every_what_field_is_in_the_name() -> None:
    """Earlier trainers, fault 5: the batch size was left out, and 24 bits were kept."""
    spec = tiny_spec()
    assert run_name(with_training(spec, batch_size=9)) != run_name(spec)
    assert len(run_name(spec).rsplit("-", 1)[1]) == 16


def test_names_do_not_collide() -> None:
    """Field fault 56."""
    names = {run_name(tiny_spec(seeds=SeedsSpec(init=seed))) for seed in range(2000)}
    assert len({name.rsplit("-", 1)[1] for name in names}) == 2000


def test_names_are_equal_in_every_process() -> None:
    """Field faults 76 and 77: no set order, no hash seed in the name."""
    code = "import icl, sys; print(icl.run_name(icl.load_spec(sys.argv[1])), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(SPECS / "quickstart.json")]
    for seed in ("0", "1", "77"):
        result = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert result.stdout.split() == [GOLDEN["quickstart"], "False"]


def test_a_field_added_later_is_left_out_at_its_default() -> None:
    assert OMITTED_AT_DEFAULT == {1: {"task.family": "linear"}}
    assert "family" not in orjson.loads(hashed_bytes(tiny_spec()))["task"]
    spec = tiny_spec()
    rule = {"training.sampling": "host"}
    assert "sampling" not in orjson.loads(hashed_bytes(spec, rule))["training"]
    assert "sampling" in orjson.loads(hashed_bytes(with_training(spec, sampling="device"), rule))["training"]
    assert hashed_bytes(spec) == hashed_bytes(attrs.evolve(spec))


@pytest.mark.parametrize("name", ["", "..", "a/b", "../a", ".hidden", "a\0b", "a\\b", "x" * 300])
def test_names_that_could_leave_the_store(name: str) -> None:
    with pytest.raises(SpecError):
        check_run_name(name)
