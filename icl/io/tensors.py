"""Tensors as files: safetensors with a digest over every bit and every word of metadata. No pickle."""

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from icl.core.backend import Tree
from icl.io.errors import CheckpointError, MissingObjectError, StoreConflictError
from icl.io.store import Store

Metadata = dict[str, str]
logger = logging.getLogger("icl")
_IDENTITY = ("kind", "run", "step", "start", "stop")
_KEY = "icl"  # the only metadata key: safetensors keeps several in no fixed order


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of CPU tensors; equal input gives equal bytes."""
    contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
    described = {**metadata, "tensors_sha256": tensors_digest(contiguous)}
    encoded = orjson.dumps(described, option=orjson.OPT_SORT_KEYS)
    envelope = {"metadata": described, "sha256": tensors_digest(contiguous, encoded)}
    return save(contiguous, {_KEY: orjson.dumps(envelope, option=orjson.OPT_SORT_KEYS).decode()})


def unpack(data: bytes, where: str) -> tuple[Tree, Metadata]:
    """The tensors and metadata of a file made by `pack`.

    Args:
        where: the file's name, for messages.

    Raises: CheckpointError for anything that is not, bit for bit, what `pack` made.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        if not 2 <= size <= len(data) - 8:
            raise ValueError(f"{len(data)} bytes that do not begin a safetensors file")
        envelope = orjson.loads(json.loads(data[8 : 8 + size])["__metadata__"][_KEY])
        metadata: Metadata = envelope["metadata"]
        tensors: Tree = load(data)
        intact = envelope["sha256"] == tensors_digest(tensors, orjson.dumps(metadata, option=orjson.OPT_SORT_KEYS))
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"{where}: got {_first_line(error)}; expected a file written by icl. It is damaged."
        ) from None
    if not intact:
        raise CheckpointError(
            f"{where}: got contents that do not match their digest; expected what was written. It is damaged."
        )
    return tensors, metadata


def publish(store: Store, path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Publish a file if absent; verify it if present; put a damaged or foreign one aside and publish again.

    Raises: StoreConflictError when an intact file there holds other tensors, whose digests and origins it names.
    """
    data = pack(tensors, metadata)
    while not store.create(path, data):
        try:
            present = store.read(path)
        except MissingObjectError:  # removed since, by another process that trains the same run
            continue
        if present == data:
            return
        try:
            _, theirs = unpack(present, path)
            foreign = [key for key in _IDENTITY if theirs.get(key) != metadata.get(key)]
            if foreign:
                raise CheckpointError(f"{path}: got the file of another {' and '.join(foreign)}; expected this one's.")
        except CheckpointError as error:
            logger.warning("%s Put aside and written again.", error)
            set_aside(store, path, present)
            continue
        ours = unpack(data, path)[1]
        if theirs["tensors_sha256"] != ours["tensors_sha256"]:
            raise StoreConflictError(
                f"{path}: got tensors with SHA-256 {ours['tensors_sha256']} from {ours.get('backend')}; expected "
                f"{theirs['tensors_sha256']}, published before from {theirs.get('backend')}. The first stays. "
                "Find out which is wrong, or write to another store."
            )
        return


def set_aside(store: Store, path: str, data: bytes) -> None:
    """Keep `data`, read at `path`, under `<run>/superseded/`, and remove it from `path` if it is still there."""
    run, _, inside = path.partition("/")
    digest = hashlib.sha256(data).hexdigest()
    store.create(f"{run}/superseded/{digest[:12]}-{inside.replace('/', '-')}", data)
    with suppress(MissingObjectError):  # put aside by another process since, which may have written a good one
        if store.read(path) == data:
            store.delete(path)


def tensors_digest(tensors: Mapping[str, torch.Tensor], prefix: bytes = b"") -> str:
    """SHA-256 over `prefix` and the names, dtypes, shapes and bits of CPU tensors, in hex."""
    names = sorted(tensors)
    shapes = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    digest = hashlib.sha256()
    for part in (prefix, orjson.dumps(shapes)):
        digest.update(len(part).to_bytes(8, "little") + part)
    for name in names:
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
