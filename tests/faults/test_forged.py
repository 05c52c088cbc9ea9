"""Files whose digest is right and whose contents are not: refused by name; no traceback, no hang, no wrong bits.

The forgeries are made from the record classes and from what a trainer writes, so that a new field is forged as well.
"""

import hashlib
import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
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
from icl.core.backend import Tree, identical
from icl.io.codec import with_run
from icl.io.documents import decode_document, encode_document
from icl.io.errors import CheckpointError
from icl.io.names import run_name
from icl.io.records import Attempt, AttemptEnd, Complete, Owner, SegmentFile, StepFile
from icl.io.rundir import read_run
from icl.io.states import run_states
from icl.io.store import open_store
from icl.io.tensors import pack, unpack
from icl.loop import execute
from icl.results import load_run, train
from tests.faults.storage import SPEC

NAME = run_name(SPEC)
HALF = attrs.evolve(SPEC.run, heartbeat_seconds=None)
Path_ = tuple[str | int, ...]
Forge = Callable[[Path], None]
MISSING = object()


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


WRONG: list[Any] = [
    MISSING,
    None,
    True,
    -1,
    1.5,
    2**31 - 1,
    2**63,
    1e300,
    "",
    "3.0",
    "９",
    "9" * 5000,
    [],
    {},
    [1],
    {"x": None},
    {"later": 1},
    nested(40),
    nested(300),
]
RECORDS = {"attempts": (Attempt, AttemptEnd), "complete.json": (Complete,), "owner": (Owner,)}
TENSORS = {"checkpoints": StepFile, "state": StepFile, "metrics": SegmentFile}


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


def keys_in(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """Where something can be forged: every key and index, at every depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*at, key)
        yield from keys_in(item, (*at, key))


def changed(value: Any, at: Path_, to: Any) -> Any:
    if not at:
        return to
    copy = dict(value) if isinstance(value, dict) else list(value)
    if to is MISSING and len(at) == 1:
        if at[0] in copy or isinstance(copy, list):
            del copy[at[0]]
    else:
        copy[at[0]] = changed(copy[at[0]] if len(at) > 1 else None, at[1:], to)
    return copy


def signed(info: Any) -> bytes:
    """A document with the right digest, also where orjson cannot write it."""
    try:
        return encode_document(info)
    except TypeError:
        text = json.dumps(info, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return f'{text[:-1]},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}'.encode()


def replace_text(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def document_forgeries(path: Path, records: tuple[type, ...]) -> Iterator[tuple[str, bytes]]:
    is_signed = path.parent.name != "owner"
    info = decode_document(path.read_bytes(), "") if is_signed else json.loads(path.read_bytes())
    record = records[-1 if path.name.endswith(".end.json") else 0]
    places = {*keys_in(info), *((field.name,) for field in attrs.fields(record))}
    for place in sorted(places, key=repr):
        for to in WRONG:
            forged = changed(info, place, to)
            yield f"{place} {str(to)[:20]}", signed(forged) if is_signed else json.dumps(forged).encode()
    for whole in (b"", b"null", b"[]", b'"x"', b"{}", b"[" * 10_000, b"\xff", signed({}), signed({"later": 1})):
        yield f"whole {whole[:9]!r}", whole


def tensor_forgeries(path: Path, record: type) -> Iterator[tuple[str, Tree, dict[str, Any]]]:
    tree, metadata = unpack(path.read_bytes(), "")
    for key in sorted({*metadata, *(field.name for field in attrs.fields(record))}):
        texts = [json.dumps(to) for to in WRONG if to is not MISSING]
        for to in [MISSING, None, [], *texts, "3", "999999999999", '["a", "a"]', '["train/loss"]']:
            yield f"{key} {str(to)[:20]}", tree, changed(metadata, (key,), to)
    for name, value in tree.items():
        others = {
            "missing": None,
            "float16": value.to(torch.float16),
            "int64": value.to(torch.int64),
            "bool": value.to(torch.bool),
            "complex": value.to(torch.complex64),
            "flat": value.reshape(-1),
            "deeper": value[None],
            "shorter": value.reshape(-1)[:-1],
            "nothing": value.reshape(-1)[:0],
            "scalar": torch.tensor(0.0),
            "wide": torch.empty(2**40, 0),
        }
        if value.dtype == torch.int64:  # other floats of the same shape are nobody's to tell
            others["another step"] = value + 1000
        for kind, other in others.items():
            forged = {key: item for key, item in tree.items() if key != name}
            yield f"{name} {kind}", forged if other is None else forged | {name: other}, metadata
    yield "another tensor", tree | {"more": torch.ones(3)}, metadata
    yield "no tensor", {}, metadata


def write_tensors(path: Path, tree: Tree, metadata: dict[str, Any]) -> None:
    """A file whose digests are right, under the name that it should have."""
    kept = {key: value for key, value in metadata.items() if key != "tensors_sha256"}
    try:
        data = pack(tree, kept)
    except TypeError:  # not even JSON
        return
    path.unlink()
    said = unpack_metadata(data)
    if path.parent.name == "metrics" and "tensors_sha256" in metadata:
        path = path.with_name(f"{path.name[:26]}{said['tensors_sha256'][:12]}.safetensors")
    path.write_bytes(data)


def unpack_metadata(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    said: dict[str, Any] = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["icl"])["metadata"]
    return said


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_socket(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has 108 characters at most
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def as_link(path: Path, to: str) -> None:
    path.unlink()
    path.symlink_to(to)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_hole(path: Path, size: int) -> None:
    os.truncate(path, size)


IRREGULAR: dict[str, Forge] = {
    "pipe": as_pipe,
    "socket": as_socket,
    "folder": as_folder,
    "device": partial(as_link, to="/dev/zero"),
    "dangling link": partial(as_link, to="nowhere"),
    "outward link": partial(as_link, to="/etc/passwd"),
    "link to itself": partial(as_link, to="."),
    "hole": partial(as_hole, size=2**40),
    "long": partial(as_hole, size=2**23),
}
NAMES = (
    b"\xff\xfe.txt",
    b"two\nlines",
    "step-００００００００００９９.safetensors".encode(),
    b"step-999999999999.safetensors",
    b"999999999990-999999999999-aaaaaaaaaaaa.safetensors",
    b"9" * 250 + b".json",
    "９.json".encode(),
    b"000000000000-aaaaaaaaaaaa.json",
    b"999999999999-999999-aaaaaaaaaaaa.json",
    b"000000000000-aaaaaaaaaaaa.end.json",
    b".tmp-x",
)


def forgeries(root: Path) -> Iterator[tuple[str, Forge]]:
    """Everything that can be wrong in a run's directory: what to do to a copy of it."""
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        inside = file.relative_to(root)
        folder = inside.parts[0]
        for kind, act in IRREGULAR.items():
            yield f"{inside}: {kind}", lambda run, inside=inside, act=act: act(run / inside)  # type: ignore[misc]
        if folder in RECORDS:
            for label, data in document_forgeries(file, RECORDS[folder]):
                yield f"{inside}: {label}", lambda run, inside=inside, data=data: replace_text(run / inside, data)  # type: ignore[misc]
        if folder in TENSORS:
            for label, tree, metadata in tensor_forgeries(file, TENSORS[folder]):
                yield (
                    f"{inside}: {label}",
                    lambda run, inside=inside, tree=tree, metadata=metadata: write_tensors(  # type: ignore[misc]
                        run / inside, tree, metadata
                    ),
                )
    for folder in (*TENSORS, "attempts", "owner", ""):
        for name in NAMES:
            yield f"{folder}/{name!r}", lambda run, folder=folder, name=name: stray(run / folder, name)  # type: ignore[misc]


def stray(folder: Path, name: bytes) -> None:
    folder.mkdir(exist_ok=True)
    Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"{}")


@pytest.fixture(scope="module")
def choices(stores: dict[str, Path]) -> list[tuple[str, str, Forge]]:
    return [(name, *found) for name, root in stores.items() for found in forgeries(root / NAME)]


@pytest.fixture(scope="module")
def right(stores: dict[str, Path]) -> dict[int, Tree]:
    run = load_run(str(stores["complete"]), NAME)
    return {step: run.params(step) for step in run.steps}


def models(store: str, right: dict[int, Tree]) -> None:
    """Every model that loads is the right one."""
    run = load_run(store, NAME)
    for step in run.steps:
        try:
            run.model(step)
            found = run.params(step)
        except CheckpointError:
            continue
        assert identical(found, right[step])


def endings(store: str, right: dict[int, Tree]) -> Iterator[tuple[str, int]]:
    """What each thing that a user may do ends with; the last two train."""
    for command in (["ls", "--json"], ["show", NAME], ["verify"], ["export", NAME, f"{store}-copy"]):
        yield command[0], store_command.main([command[0], store, *command[1:]])
    foreign = [NAME, f"{store}-foreign", "--format", SPEC.model.architecture]
    yield "export to a format", store_command.main(["export", store, *foreign])
    yield "import", store_command.main(["import", f"{store}-imported", f"{store}/{NAME}"])
    yield "metrics", guarded(lambda: load_run(store, NAME).metrics().empty)
    yield "models", guarded(lambda: bool(models(store, right)))
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
        assert guarded(lambda store=store: bool(models(str(store), right))) in (0, 4), where  # type: ignore[misc]
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
    assert spec.run == attrs.evolve(spec.run)
    assert "invented_later" in caplog.text
    assert run.manifest.attempts()[0]["invented_too"] == [1]
    assert store_command.main(["verify", str(store)]) == 4
    assert "run.invented_later" in capfd.readouterr().out
