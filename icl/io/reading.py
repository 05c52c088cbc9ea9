"""Reading what is saved: looked at twice before it is called damaged."""

from collections.abc import Callable
from typing import TypeVar

from icl.io.errors import CheckpointError, TransientStoreError
from icl.io.store import LARGEST_DOCUMENT, Store

_Decoded = TypeVar("_Decoded")


def read_decoded(
    store: Store, path: str, decode: Callable[[bytes, str], _Decoded], limit: int = LARGEST_DOCUMENT
) -> _Decoded:
    """What `decode(data, path)` makes of an object of at most `limit` bytes.

    Raises: CheckpointError when it is damaged, which a second read has confirmed; MissingObjectError when it is not
        there; TransientStoreError when two reads give different bytes and neither is right.
    """
    data = store.read(path, limit)
    try:
        return decode(data, path)
    except CheckpointError as error:
        again = store.read(path, limit)
        if again == data:
            raise
        try:
            return decode(again, path)
        except CheckpointError:
            raise TransientStoreError(
                f"{store.url}/{path}: got other bytes from each of two reads ({error}); expected the same. "
                "The storage or the memory of this machine errs; what is saved may be right. Read it again elsewhere."
            ) from None
