"""A whole run, a sweep and the kill campaign on backends that icl has no line about."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from icl.core.families.linear import LinearTask
from icl.core.spec import StepsSpec
from icl.io.codec import with_run
from icl.io.manifest import Manifest
from icl.io.store import open_store
from icl.io.sweepfile import load_sweep
from icl.loop import execute
from icl.testing import StrictBackend, tiny_spec
from tests.faults.campaign import campaign
from tests.faults.chaos import Place, write_sweep
from tests.faults.runs import SPEC, differences, finish, read_saved, start, verify, write_spec
from tests.toy import ToyBackend

ON_TOY = {**SPEC, "run": {**SPEC["run"], "backend": ToyBackend.name}}


@pytest.mark.parametrize("num_tasks", [None, 5])
def test_a_strict_backend_trains_to_the_same_bits(num_tasks: int | None, tmp_path: Path) -> None:
    """No effect of a run reads consumed state, and nothing compiled reads a value or draws from a global generator."""
    spec = tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=num_tasks))
    plain, strict = str(tmp_path / "plain"), str(tmp_path / "strict")
    execute(with_run(spec, store=plain))
    backend, chunks, spec = StrictBackend(), iter([False, False, True]), with_run(spec, store=strict)
    assert execute(spec, backend=backend, should_stop=lambda: next(chunks)).status == "interrupted"
    assert execute(spec, backend=backend).status == "complete"
    late = with_run(spec, checkpoint_at=StepsSpec(also=(1, 11)))
    assert execute(late, backend=backend).status == "complete"
    assert not differences(read_saved(plain), read_saved(strict), common=True)
    assert backend.host_reads == 0


def described(store: Path, name: str) -> set[str]:
    """The backends that a run's attempts say they trained on."""
    return {attempt["backend"]["backend"] for attempt in Manifest(open_store(str(store)), name).attempts()}


def test_a_toy_backend_trains_a_run(tmp_path: Path) -> None:
    process = start(write_spec(tmp_path / "spec.json", ON_TOY), tmp_path / "store", tmp_path / "log")
    code, stdout = finish(process)
    assert code == 0, (tmp_path / "log").read_text()
    assert described(tmp_path / "store", json.loads(stdout)["run"]) == {ToyBackend.name}


def test_a_toy_backend_trains_a_sweep(tmp_path: Path) -> None:
    place = Place(tmp_path, write_sweep(tmp_path, 2, ON_TOY), "toy")
    assert place.start("cpu:2").wait(300) == 0, (tmp_path / "toy.log").read_text()
    names = [member.name for member in load_sweep(place.file).members]
    assert [described(place.store, name) for name in names] == [{ToyBackend.name}] * 2
    assert verify(place.store).returncode == 0


def test_a_toy_backend_survives_the_kill_campaign(tmp_path: Path) -> None:
    result = campaign(tmp_path, kills=3, seed=1, backend=ToyBackend.name)
    assert result.faults == []
    assert result.equal == result.runs


@pytest.mark.parametrize("name", ["absent.package:Class", "tests.toy:Absent"])
def test_what_is_not_installed_is_no_traceback(tmp_path: Path, name: str) -> None:
    spec = write_spec(tmp_path / "spec.json", SPEC)
    command = [sys.executable, "-m", "icl.run", str(spec), "--store", str(tmp_path / "store"), "--backend", name]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 3
    assert f"error: backend {name}: got" in ended.stderr
    assert "PYTHONPATH" in ended.stderr
    assert "Traceback" not in ended.stderr
