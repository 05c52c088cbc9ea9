"""What the name of a store means: one location, however it is written and wherever it is read from."""

import os
import re

from icl.io.errors import StoreError

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def resolve_location(name: str) -> str:
    """The one form of a store's name: an absolute path without links, or a URL.

    Raises: StoreError for what is neither, such as a URL with a slash too few.
    """
    if "\0" in name or not name.strip():
        raise _refused(name, "Correct it.")
    scheme, separator, rest = name.partition("://")
    local = scheme in ("file", "local")
    if separator and not local:
        return f"{'gs' if scheme == 'gcs' else scheme}://{rest.rstrip('/')}"
    if separator and not rest.startswith("/"):
        raise _refused(name, f"Write {scheme}:///folder, or a local path as it is.")
    if not separator and _SCHEME.match(name):
        raise _refused(name, f"Write scheme://folder for a URL, or ./{name} for a local folder of that name.")
    path = rest if separator else os.path.expanduser(name)
    if path.startswith("~"):
        raise _refused(name, f"There is no such user; write ./{name} for a local folder of that name.")
    try:
        return os.path.realpath(path)
    except OSError as error:  # the folder of this process is gone
        raise _refused(name, f"It cannot be found ({error.strerror}); write the whole path.") from None


def is_local(location: str) -> bool:
    """Whether a location that `resolve_location` gave is a folder of this machine."""
    return "://" not in location


def _refused(name: str, remedy: str) -> StoreError:
    return StoreError(f"store: got {name!r}; expected a local path or an fsspec URL. {remedy}")
