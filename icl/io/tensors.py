"""Tensors as files: safetensors with a digest over every bit and every word of metadata. No pickle."""

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Mapping
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
_SLACK = 2**20  # bytes by which the metadata of two writers of one file may differ
_KEY = "icl"  # the only metadata key: safetensors keeps several in no fixed order


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file of CPU tensors; equal input gives equal bytes."""
    contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
    described = {**metadata, "tensors_sha256": tensors_digest(contiguous)}
    encoded = orjson.dumps(described, option=orjson.OPT_SORT_KEYS)
    envelope = {"metadata": described, "sha256": tensors_digest(contiguous, encoded)}
    return save(contiguous, {_KEY: orjson.dumps(envelope, option=orjson.OPT_SORT_KEYS).decode()})


def unpack(data: bytes, where: str) -> tuple[Tree, Metadata]:
    """The tensors, by name, and the metadata of a file made by `pack`.

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
        if not all(type(value) is str for value in metadata.values()):
            raise TypeError("metadata that are not strings")
        loaded: Tree = load(data)
        tensors = {name: loaded[name] for name in sorted(loaded)}  # they come in another order in every process
        intact = envelope["sha256"] == tensors_digest(tensors, orjson.dumps(metadata, option=orjson.OPT_SORT_KEYS))
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{where}: got {_first_line(error)}; expected a file written by icl. It is damaged."
        ) from None
    if not intact:
        raise CheckpointError(
            f"{where}: got contents that do not match their digest; expected what was written. It is damaged."
        )
    return tensors, metadata


def publish(
    store: Store,
    path: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    decode: Callable[[bytes, str], tuple[Tree, Metadata]] = unpack,
) -> None:
    """Publish a file if absent; verify it if present; put a damaged or foreign one aside and publish again.

    Args:
        decode: raises CheckpointError for what cannot be the file at `path`.

    Raises: StoreConflictError when an intact file there holds other tensors, whose digests and origins it names.
    """
    data = pack(tensors, metadata)
    while not store.create(path, data):
        try:
            present = store.read(path, len(data) + _SLACK)
        except MissingObjectError:  # removed since, by another process that trains the same run
            continue
        except CheckpointError as error:
            logger.warning("%s Put aside and written again.", error)
            set_aside(store, path)
            continue
        if present == data:
            return
        try:
            _, theirs = decode(present, path)
        except CheckpointError as error:
            with suppress(MissingObjectError):
                if store.read(path, len(data) + _SLACK) == present:  # or the first read was wrong
                    logger.warning("%s Put aside and written again.", error)
                    set_aside(store, path, present)
            continue
        ours = unpack(data, path)[1]
        if theirs.get("tensors_sha256") != ours["tensors_sha256"]:
            raise StoreConflictError(
                f"{path}: got tensors with SHA-256 {ours['tensors_sha256']} from {ours.get('backend')}; expected "
                f"{theirs.get('tensors_sha256')}, published before from {theirs.get('backend')}. The first stays. "
                "Find out which is wrong, or write to another store."
            )
        return


def set_aside(store: Store, path: str, data: bytes | None = None) -> None:
    """Keep `data`, read at `path`, under `<run>/superseded/`, and remove it from `path` if it is still there.

    Without data, as of what cannot be read, whatever is at `path` is renamed.
    """
    run, _, inside = path.partition("/")
    label = secrets.token_hex(6) if data is None else hashlib.sha256(data).hexdigest()[:12]
    aside = f"{run}/superseded/{label}-{inside.replace('/', '-')}"
    if data is None:
        store.move(path, aside)
        return
    store.create(aside, data)
    with suppress(MissingObjectError):  # put aside by another process since, which may have written a good one
        if store.read(path, len(data)) == data:
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
