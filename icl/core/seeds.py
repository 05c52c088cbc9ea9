"""Named, non-overlapping random streams: (root seed, path) -> bits, by hashing, never by adding."""

import hashlib
from typing import TypeAlias

import numpy as np

PathPart: TypeAlias = str | int


def derive_key(root: int, *path: PathPart) -> tuple[int, int]:
    """The 128-bit key of the stream `path` under `root`, as two 64-bit words.

    Parts are hashed with their type and length: ("train", 11) and ("train1", 1), or 1 and "1", are different streams.

    Args:
        root: a seed of the spec, 0 <= root < 2**64.
        path: the stream's name, e.g. ("train", step).

    Source: SHA-256; the words key NumPy's Philox 4x64 (Salmon et al. 2011).
    """
    digest = hashlib.sha256()
    for part in (root, *path):
        kind, text = (b"i", str(part)) if isinstance(part, int) else (b"s", part)
        encoded = text.encode()
        digest.update(kind + len(encoded).to_bytes(8, "little") + encoded)
    words = digest.digest()
    return int.from_bytes(words[:8], "little"), int.from_bytes(words[8:16], "little")


def derive_seed(root: int, *path: PathPart) -> int:
    """A 63-bit seed of the stream, for generators that take one integer."""
    return derive_key(root, *path)[0] >> 1


def derive_generator(root: int, *path: PathPart) -> np.random.Generator:
    """A private NumPy generator at the start of the stream; touches no global state."""
    return np.random.Generator(np.random.Philox(key=np.array(derive_key(root, *path), dtype=np.uint64)))
