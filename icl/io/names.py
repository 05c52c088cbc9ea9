"""A run's name: readable, and a hash of everything that defines the experiment."""

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from icl.core.errors import SpecError
from icl.core.spec import Experiment
from icl.io.codec import encode_spec, load_spec

OMITTED_AT_DEFAULT: dict[int, dict[str, Any]] = {1: {"task.family": "linear"}}
"""By schema: path -> default of fields added after the schema was published.

Such a field is left out of the hashed bytes while it holds that default, so that names given before it existed stay.
"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,199}")


def run_name(spec: Experiment | Mapping[str, Any]) -> str:
    """E.g. "L2H4-Minf-s0-3f9c2a10b7de4a51": a slug and 64 bits of the SHA-256 of the experiment.

    Two different experiments have different names; `run` and the way a spec is written do not count.
    """
    spec = spec if isinstance(spec, Experiment) else load_spec(spec)
    model, tasks = spec.model, spec.task.num_tasks
    slug = f"L{model.num_layers}H{model.num_heads}-M{'inf' if tasks is None else tasks}-s{spec.seeds.init}"
    return f"{slug}-{hashlib.sha256(hashed_bytes(spec)).hexdigest()[:16]}"


def hashed_bytes(experiment: Experiment, omitted: dict[str, Any] | None = None) -> bytes:
    """The canonical experiment without the fields of `OMITTED_AT_DEFAULT` at their default.

    It names the run, and its spec.json holds it.
    """
    data = orjson.loads(encode_spec(experiment.experiment))
    for path, default in (OMITTED_AT_DEFAULT[experiment.schema] if omitted is None else omitted).items():
        *parents, leaf = path.split(".")
        owner = data
        for parent in parents:
            owner = owner[parent]
        if owner.get(leaf) == default:
            del owner[leaf]
    return orjson.dumps(data, option=orjson.OPT_SORT_KEYS)


def natural_order(name: str) -> tuple[str | float, ...]:
    """A sort key under which M4 comes before M16 and Minf last: words by letter, numbers by size."""
    parts = re.split(r"(\d+|(?<=-M)inf)", name)  # words and numbers in turn, a word first
    return tuple(
        part if index % 2 == 0 else math.inf if part == "inf" else int(part) for index, part in enumerate(parts)
    )


def is_run_name(name: str) -> bool:
    """Whether a run can have that name."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name))


def check_run_name(name: str) -> str:
    """`name` if it can be a run's; raises SpecError for what could leave the store (`..`, a slash, nothing)."""
    if not is_run_name(name):
        raise SpecError(
            f"run name: got {name!r}; expected letters, digits, '-' and '_'. `python -m icl.store ls URL` lists them."
        )
    return name
