"""Files whose digest is right and whose contents are not: refused by name; no traceback, no hang, no wrong bits."""

import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
import torch
from hypothesis import settings

from icl import store as store_command
from icl.attempt import attempt, guarded
from icl.core.architectures.timaeus import Timaeus
from icl.core.backend import Tree, identical
from icl.core.families.linear import LinearTask
from icl.core.spec import RunSpec, StepsSpec, TrainingSpec
from icl.io.codec import encode_spec, spec_to_data, with_run
from icl.io.documents import decode_document, encode_document
from icl.io.errors import CheckpointError
from icl.io.names import run_name
from icl.io.rundir import open_run, read_run
from icl.io.states import run_states
from icl.io.store import open_store
from icl.io.tensors import pack, unpack
from icl.loop import execute
from icl.results import load_run, train
from tests.faults.storage import SPEC
from tests.forgeries import IRREGULAR, Forge, as_hole, as_link, as_pipe, forgeries, stray, write_tensors

NAME = run_name(SPEC)
HALF = attrs.evolve(SPEC.run, heartbeat_seconds=None)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A complete run, and one that was cut off and whose dead owner has left its heartbeat."""
    root = tmp_path_factory.mktemp("stores")
    train(SPEC, store=str(root / "complete"))
    asked = iter([False, True])
    execute(with_run(SPEC, store=str(root / "half")), should_stop=lambda: next(asked))
    beat = {"every": 0.01, "host": "gone", "machine": "another", "pid": 1, "token": "x", "count": 1}
    (root / "half" / NAME / "owner").mkdir(exist_ok=True)
    (root / "half" / NAME / "owner" / "000000000001.json").write_bytes(orjson.dumps(beat))
    return {name: root / name for name in ("complete", "half")}


@pytest.fixture(scope="module")
def choices(stores: dict[str, Path]) -> list[tuple[str, str, Forge]]:
    return [(name, *found) for name, root in stores.items() for found in forgeries(root / NAME)]


@pytest.fixture(scope="module")
def right(stores: dict[str, Path]) -> dict[int, Tree]:
    run = load_run(str(stores["complete"]), NAME)
    return {step: run.params(step) for step in run.steps}


def models(store: str, right: dict[int, Tree]) -> int:
    """Load every model: those that are not refused are the right ones."""
    run = load_run(store, NAME)
    for step in run.steps:
        try:
            run.model(step)
            found = run.params(step)
        except CheckpointError:
            continue
        assert identical(found, right[step])
    return 0


def endings(store: str, right: dict[int, Tree]) -> Iterator[tuple[str, int]]:
    """What each thing that a user may do ends with; the last two train."""
    for command in (["ls", "--json"], ["show", NAME], ["verify"], ["export", NAME, f"{store}-copy"]):
        yield command[0], store_command.main([command[0], store, *command[1:]])
    foreign = [NAME, f"{store}-foreign", "--format", SPEC.model.architecture]
    yield "export to a format", store_command.main(["export", store, *foreign])
    yield "import", store_command.main(["import", f"{store}-imported", f"{store}/{NAME}"])
    yield "metrics", guarded(lambda: load_run(store, NAME).metrics().empty)
    yield "models", guarded(lambda: models(store, right))
    yield "states", guarded(lambda: not run_states(open_store(store), [(NAME, SPEC)], pause=lambda seconds: None))
    yield "start", attempt(with_run(SPEC, store=store), should_stop=lambda: True).code
    yield "run", attempt(attrs.evolve(SPEC, run=attrs.evolve(HALF, store=store))).code


def test_a_forged_file_is_refused_by_name_or_harmless(
    stores: dict[str, Path], choices: list[tuple[str, str, Forge]], right: dict[int, Tree], tmp_path: Path
) -> None:
    """Some hundred of several thousand, by chance."""
    seed = random.randrange(2**32)
    for base, label, forge in random.Random(seed).sample(choices, 6 * settings().max_examples):
        folder = tmp_path / "forged"
        store = folder / "store"
        shutil.copytree(stores[base], store)
        forge(store / NAME)
        where = f"seed {seed}: {base} {label}"
        try:
            codes = dict(endings(str(store), right))
        except Exception as error:
            raise AssertionError(where) from error
        assert set(codes.values()) <= {0, 4, 75}, (where, codes)
        if codes["verify"] == 0:
            assert {code for what, code in codes.items() if what != "start"} == {0}, (where, codes)
        assert guarded(partial(models, str(store), right)) in (0, 4), where
        shutil.rmtree(folder)


@pytest.mark.parametrize("folder", ["checkpoints", "state"])
def test_a_forged_file_is_put_aside_and_computed_again(stores: dict[str, Path], tmp_path: Path, folder: str) -> None:
    """Also what cannot be read, as a pipe, and what fits its digest but not the spec."""
    for forge in (as_pipe, partial(as_link, to="/dev/zero"), partial(as_hole, size=2**40), other_shape):
        store = tmp_path / "store"
        shutil.copytree(stores["half"], store)
        forge(sorted((store / NAME / folder).iterdir())[-1])
        assert attempt(attrs.evolve(SPEC, run=attrs.evolve(HALF, store=str(store)))).code == 0
        shutil.rmtree(store / NAME / "superseded", ignore_errors=True)
        assert store_command.main(["verify", str(store)]) == 0
        shutil.rmtree(store)


def as_whole_run(path: Path) -> None:
    path.write_bytes(encode_document({"step": SPEC.training.total_steps}))


@pytest.mark.parametrize("forge", [Path.touch, Path.mkdir, as_whole_run, lambda path: path.write_bytes(b"[]")])
def test_a_run_that_is_called_complete_and_is_not_goes_on_or_is_refused(
    stores: dict[str, Path], tmp_path: Path, forge: Forge
) -> None:
    """What is damaged says nothing; an intact one over a run that has no end names what to do."""
    store = tmp_path / "store"
    shutil.copytree(stores["half"], store)
    forge(store / NAME / "complete.json")
    spec = attrs.evolve(SPEC, run=attrs.evolve(HALF, store=str(store)))
    ending = attempt(spec)
    if forge is as_whole_run:
        assert ending.code == 4
        assert "Move complete.json away and run again" in str(ending.error)
        (store / NAME / "complete.json").unlink()
        assert attempt(spec).code == 0
    else:
        assert ending.code == 0
    assert store_command.main(["verify", str(store)]) == 0


def other_shape(path: Path) -> None:
    tree, metadata = unpack(path.read_bytes(), "")
    write_tensors(path, {name: value[..., None] for name, value in tree.items()}, metadata)


def test_verify_lists_every_forged_file(
    stores: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(stores["complete"], store)
    run = store / NAME
    files = sorted(path for path in run.rglob("*") if path.is_file())
    for file, forge in zip(files, IRREGULAR.values(), strict=False):
        forge(file)
    stray(run / "checkpoints", b"\xff\xfe.txt")
    capfd.readouterr()
    assert store_command.main(["verify", str(store)]) == 4
    out = capfd.readouterr().out
    for file in files[: len(IRREGULAR)]:
        assert file.name in out
    assert r"\udcff\udcfe.txt" in out


def test_another_versions_run_half_leaves_the_run_readable(
    stores: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(stores["complete"], store)
    (begun,) = (path for path in (store / NAME / "attempts").iterdir() if not path.name.endswith(".end.json"))
    info = decode_document(begun.read_bytes(), "")
    begun.write_bytes(encode_document(info | {"run": info["run"] | {"invented_later": 1}, "invented_too": [1]}))
    run, spec = read_run(open_store(str(store)), NAME)
    assert spec.run == RunSpec()
    assert "invented_later" in caplog.text
    assert run.manifest.attempts()[0]["invented_too"] == [1]
    assert store_command.main(["verify", str(store)]) == 4
    assert "run.invented_later" in capfd.readouterr().out


GIANTS: dict[str, Any] = {
    "task": LinearTask(task_dim=2**31 - 1, num_examples=2**31 - 1, num_tasks=2**31 - 1),
    "model": Timaeus(num_layers=4096, num_heads=1, embed_dim=2**31 - 1),
    "training": TrainingSpec(total_steps=2**24),
}


@pytest.mark.parametrize("section", sorted(GIANTS))
def test_the_spec_of_a_giant_costs_no_memory(tmp_path: Path, section: str) -> None:
    """Its name is right, so that nothing but its size tells it from a run of ours."""
    store, spec = str(tmp_path / "store"), attrs.evolve(SPEC, **{section: GIANTS[section]})
    run = open_run(open_store(store), spec)
    huge = attrs.evolve(spec.run, checkpoint_at=StepsSpec(log=2**31 - 1, also=(1,)))
    info = spec_to_data(attrs.evolve(spec, run=huge))["run"]
    run.manifest.record_attempt({"from_step": 0, "started": "", "run": info})
    for folder, name in (("checkpoints", "step-000000000000"), ("state", "step-000000000001")):
        run.store.create(f"{run.name}/{folder}/{name}.safetensors", pack({"x": torch.ones(1)}, {}))
    commands = [["verify", store], ["export", store, run.name, f"{store}-copy"]]
    commands.append(["export", store, run.name, f"{store}-foreign", "--format", "timaeus"])
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "spec.json").write_bytes(encode_spec(spec))
    (foreign / "step-1.pt").write_bytes(b"PK")
    commands.append(["import", f"{store}-imported", str(foreign)])
    assert [store_command.main(command) for command in commands] == [4] * len(commands)
    assert store_command.main(["show", store, run.name]) == 0
