"""Flipped bits and hostile files: found or harmless, never loaded, never executed, and nothing written outside."""

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from icl import store as store_command
from icl.core.backend import Tree
from icl.core.errors import SpecError
from icl.core.spec import RunSpec, SeedsSpec
from icl.io.codec import with_run
from icl.io.errors import CheckpointError, MissingObjectError, StoreError
from icl.io.manifest import stored_experiment
from icl.io.rundir import RunDir, read_run
from icl.io.store import open_store
from icl.io.verify import verify_run
from icl.loop import execute
from icl.results import list_runs, load_run, train
from tests.faults.runs import differences, read_saved
from tests.faults.storage import SPEC

FLIPS = 1000


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    store = str(tmp_path_factory.mktemp("trained"))
    return read_run(open_store(store), train(SPEC, store=store).name)[0]


@pytest.fixture
def fresh(tmp_path: Path) -> RunDir:
    store = str(tmp_path / "store")
    return read_run(open_store(store), train(SPEC, store=store).name)[0]


def bits(tree: Tree) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in tree.items()}


def load_bits(run: RunDir, step: int) -> dict[str, bytes]:
    return bits(run.load_checkpoint(step))


def loaded(run: RunDir) -> dict[str, Any]:
    """Everything that can be read of a run; what is refused is left out."""
    reads: dict[str, Callable[[], Any]] = {
        "spec": lambda: stored_experiment(run.store, run.name),
        "half": lambda: read_run(run.store, run.name)[1],
        "metrics": lambda: {step: {k: v.hex() for k, v in row.items()} for step, row in run.metrics().items()},
        "state": lambda: bits((run.newest_state() or (0, {}))[1]),
        "attempts": run.manifest.attempts,
    }
    reads |= {f"step {step}": partial(load_bits, run, step) for step in run.checkpoint_steps()}
    found = {}
    for name, read in reads.items():
        try:
            found[name] = read()
        except (CheckpointError, SpecError):
            continue
    return found


def said(data: bytes) -> tuple[Any, bytes]:
    """What a file says, whatever its blanks and the digits of a float beyond the last that counts: JSON and tensors."""
    if data.startswith(b"{"):
        return json.loads(data), b""
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def is_less_of(attempts: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    """Whether each says nothing but what one of the right ones says: a damaged file of an attempt is left out."""
    return all(any(attempt.items() <= other.items() for other in right) for attempt in attempts)


def test_a_flipped_bit_is_found_or_harmless(trained: RunDir) -> None:
    """A thousand, anywhere; a damaged newest state falls back to the one before, which is right as well."""
    root = Path(trained.store.url)
    files = [path for path in root.rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files]
    right = loaded(trained)
    older = trained.state_steps()[-2]
    fallback = bits(trained.load("state", trained.step_path("state", older))[0])
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    found = 0
    for _ in range(FLIPS):
        # Half of them anywhere in the bytes, half in a file of chance, so that small files have their share.
        (path,) = chance.choices(files, sizes if chance.random() < 0.5 else None)
        before = path.read_bytes()
        place, bit = chance.randrange(len(before)), chance.randrange(8)
        damaged = bytearray(before)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            faults = list(verify_run(trained))
            wrong = [
                name
                for name, value in loaded(trained).items()
                if value != right[name]
                and not (name == "state" and value == fallback)
                and not (name == "attempts" and faults and is_less_of(value, right[name]))
                and not (name == "half" and faults and attrs.evolve(value.run, store="runs") == RunSpec())
            ]
        finally:
            path.write_bytes(before)
        where = f"seed {seed}: bit {bit} of byte {place} of {path}"
        assert not wrong, where
        assert faults or said(bytes(damaged)) == said(before), where
        found += bool(faults)
    assert found > 0.9 * FLIPS
    assert list(verify_run(trained)) == []


class Bomb:
    """What a pickle runs when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


def safetensors(header: Any, size: int | None = None) -> bytes:
    """A file with that header, which says that it has `size` bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + bytes(64)


def zipped() -> bytes:
    """A hundred megabytes of zeros in a hundred kilobytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("bomb", "w") as file:
        for _ in range(6):
            file.write(bytes(2**24))
    return buffer.getvalue()


def hostile(marker: Path) -> dict[str, bytes]:
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    return {
        "pickle": pickle.dumps(Bomb(marker)),
        "zip": zipped(),
        "empty": b"",
        "huge header": safetensors({}, 2**62),
        "negative header": safetensors({}, 2**64 - 1),
        "negative offsets": safetensors({"x": {**tensor, "data_offsets": [-16, 0]}}),
        "huge offsets": safetensors({"x": {**tensor, "data_offsets": [0, 2**60]}}),
        "huge shape": safetensors({"x": {**tensor, "shape": [2**40, 2**40]}}),
        "deep header": safetensors(b"[" * 200_000),
        "list header": safetensors([]),
        "no metadata": safetensors({"x": tensor}),
        "other metadata": safetensors({"__metadata__": {"icl": "[]"}, "x": tensor}),
        "text": b"hello",
    }


@pytest.mark.parametrize("folder", ["checkpoints", "state", "metrics"])
def test_a_hostile_file_is_refused_and_not_executed(fresh: RunDir, tmp_path: Path, folder: str) -> None:
    marker = tmp_path / "executed"
    target = sorted((Path(fresh.store.url) / fresh.name / folder).iterdir())[-1]
    outside = {path for path in tmp_path.rglob("*") if fresh.name not in str(path)}
    for kind, data in hostile(marker).items():
        target.write_bytes(data)
        (fault,) = verify_run(fresh)
        assert "It is damaged" in fault, kind
        if folder == "checkpoints":
            with pytest.raises(CheckpointError, match="It is damaged"):
                fresh.load_checkpoint(6)
        elif folder == "metrics":
            with pytest.raises(CheckpointError, match="It is damaged"):
                fresh.metrics()
        else:
            assert fresh.newest_state() is None or fresh.newest_state()[0] < 6  # type: ignore[index]
    assert not marker.exists()
    assert {path for path in tmp_path.rglob("*") if fresh.name not in str(path)} == outside


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "/etc", "", ".", "a\\b", "a\0b", "-x"])
def test_a_run_name_cannot_leave_the_store(fresh: RunDir, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SpecError, StoreError)):
        load_run(fresh.store.url, name)
    if "\0" not in name:
        for command in ("show", "verify"):
            arguments = [command, fresh.store.url, *(["--", name] if name.startswith("-") else [name])]
            assert store_command.main(arguments) in (2, 4) or (command == "verify" and name == "")
    assert "Traceback" not in capfd.readouterr().err


def test_a_spec_beside_foreign_data_is_refused(fresh: RunDir, tmp_path: Path) -> None:
    root = Path(fresh.store.url)
    other = root / f"{fresh.name[:-1]}{'0' if fresh.name[-1] != '0' else '1'}"
    (root / fresh.name).rename(other)
    with pytest.raises(CheckpointError, match=r"got the spec of .*; expected that of .*foreign"):
        load_run(str(root), other.name)
    (other / "spec.json").unlink()
    with pytest.raises(CheckpointError, match="got nothing; expected the spec of this run"):
        load_run(str(root), other.name)
    assert [run.name for run in list_runs(str(root))] == [other.name]
    assert store_command.main(["verify", str(root)]) == 4


def test_what_lies_under_the_name_of_a_run_is_not_trained_on(fresh: RunDir) -> None:
    """Another experiment's state, copied to where this one's belongs."""
    root = Path(fresh.store.url)
    other = train(attrs.evolve(SPEC, seeds=SeedsSpec(init=5)), store=str(root))
    newest = sorted((root / fresh.name / "state").iterdir())[-1]
    newest.write_bytes((root / other.name / "state" / newest.name).read_bytes())
    (fault,) = verify_run(fresh)
    assert f"of run {other.name}; expected what its name and folder say" in fault
    found = fresh.newest_state()
    assert found is not None
    assert found[0] < 6


@pytest.mark.parametrize("half", [False, True], ids=["complete", "interrupted"])
def test_a_moved_run_goes_on_working(fresh: RunDir, tmp_path: Path, store_url: str, half: bool) -> None:
    """From one root to another, and from a local folder to a bucket."""
    reference = read_saved(fresh.store.url)
    source = str(tmp_path / "half")
    if half:
        execute(with_run(SPEC, store=source), should_stop=lambda: True)
    else:
        source = fresh.store.url
    target = open_store(f"{store_url}/moved")
    for path in Path(source).rglob("*"):
        if path.is_file():
            target.create(path.relative_to(source).as_posix(), path.read_bytes())
    run = train(SPEC, store=target.url)
    assert run.status == "complete"
    assert list(verify_run(RunDir(target, run.name))) == []
    assert differences(reference, read_saved(target.url)) == []
    with pytest.raises(MissingObjectError):
        target.read(f"{run.name}/state/step-000000000001.safetensors")
