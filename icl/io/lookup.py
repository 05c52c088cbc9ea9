"""Which run of a store is meant by a part of its name."""

import difflib

from icl.io.errors import StoreError
from icl.io.manifest import is_of_run
from icl.io.names import check_run_name, natural_order
from icl.io.store import Store

_SHOWN = 8


def find_run(store: Store, text: str) -> str:
    """The name of the one run whose name, or the hash at its end, begins with `text`.

    Raises: StoreError when there is none, with the nearest names, or more than one, with those; SpecError for what no
        name can begin with.
    """
    check_run_name(text)
    if _is_run(store, text):
        return text
    there = sorted(store.list(), key=natural_order)
    found = [
        name
        for name in there
        if (name.startswith(text) or name.rpartition("-")[2].startswith(text)) and _is_run(store, name)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise StoreError(
            f"{store.url}: got {text!r}, with which {len(found)} runs begin; expected one of them "
            f"({_some(found)}). Write more of its name."
        )
    near = difflib.get_close_matches(text, there, n=len(there) or 1, cutoff=0)
    runs = _some([*near, *(name for name in there if name not in near)]) if there else "none"
    raise StoreError(
        f"{store.url}: got no run {text!r}; expected one of those there ({runs}), or enough of its name or hash. "
        f"`python -m icl.store ls {store.url}` lists them."
    )


def _is_run(store: Store, name: str) -> bool:
    return is_of_run(store.list(name))


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
