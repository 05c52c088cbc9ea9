"""Everything that can be wrong in a run's directory although its digests are right: made from the record classes.

A field, a document or a tensor that is added later is forged as well, without a change here.
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from icl.core.backend import Tree
from icl.core.spec import Spec
from icl.io.documents import decode_document, encode_document
from icl.io.records import Attempt, AttemptEnd, Complete, Owner, SegmentFile, StepFile
from icl.io.tensors import pack, tensors_digest, unpack

Place = tuple[str | int, ...]
Forge = Callable[[Path], object]
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
RECORDS = {"attempts": (Attempt, AttemptEnd), "complete.json": (Complete,), "owner": (Owner,), "spec.json": (Spec,)}
TENSORS = {"checkpoints": StepFile, "state": StepFile, "metrics": SegmentFile}


def keys_in(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where something can be forged: every key and index, at every depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*at, key)
        yield from keys_in(item, (*at, key))


def changed(value: Any, at: Place, to: Any) -> Any:
    if not at:
        return to
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    key: Any = at[0]
    if to is not MISSING or len(at) > 1:
        copy[key] = changed(copy[key] if len(at) > 1 else None, at[1:], to)
    elif isinstance(copy, list) or key in copy:
        del copy[key]
    return copy


def signed(info: Any) -> bytes:
    """A document with the right digest, also where orjson cannot write it."""
    try:
        return encode_document(info)
    except TypeError:
        text = json.dumps(info, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return f'{text[:-1]},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}'.encode()


def document_forgeries(path: Path, records: tuple[type, ...]) -> Iterator[tuple[str, bytes]]:
    is_signed = path.parent.name != "owner" and path.name != "spec.json"
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
    if path.parent.name == "metrics":
        path = path.with_name(f"{path.name[:26]}{tensors_digest(tree)[:12]}.safetensors")
    path.write_bytes(data)


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
                yield f"{inside}: {label}", lambda run, inside=inside, data=data: (run / inside).write_bytes(data)  # type: ignore[misc]
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
