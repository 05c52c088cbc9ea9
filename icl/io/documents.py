"""Small JSON documents that carry their own digest, so that a flipped bit is found."""

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from icl.io.errors import CheckpointError

_DIGEST = "sha256"
_DEPTH = 32  # of objects and lists in each other; ours have 4


def encode_document(info: Mapping[str, Any]) -> bytes:
    """Readable JSON of `info` with the SHA-256 of its canonical form."""
    document = {**info, _DIGEST: _digest(info)}
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)


def decode_document(data: bytes, where: str) -> dict[str, Any]:
    """What `encode_document` was given. Raises CheckpointError for anything else, naming `where`."""
    try:
        document = orjson.loads(data)
        digest = document.pop(_DIGEST)
        if not _is_shallow(document, _DEPTH):
            raise ValueError(f"objects and lists more than {_DEPTH} deep")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{where}: got what is no document with a digest ({type(error).__name__}: {error}); expected what was "
            "written. It is damaged."
        ) from None
    if digest != _digest(document):
        raise CheckpointError(
            f"{where}: got contents that do not match their digest; expected what was written. It is damaged."
        )
    return dict(document)


def _is_shallow(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in inner)


def _digest(info: Mapping[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(dict(info), option=orjson.OPT_SORT_KEYS)).hexdigest()
