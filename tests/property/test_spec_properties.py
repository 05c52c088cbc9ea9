"""Laws of specs: any data is a spec or one clear error; a name hangs on what the experiment is and on nothing else."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import attrs
from hypothesis import assume, given
from hypothesis import strategies as st

from icl.core.errors import SpecError
from icl.core.families.linear import LinearTask
from icl.core.spec import Spec, TrainingSpec
from icl.io.codec import decode_spec, encode_spec, spec_from_data, spec_to_data
from icl.io.names import run_name
from icl.testing import specs

KEYS = [
    *attrs.fields_dict(Spec),
    *attrs.fields_dict(LinearTask),
    *attrs.fields_dict(TrainingSpec),
    "checkpoint_at",
    "store",
]
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=2)
    | st.integers(4000, 5000).map(lambda digits: 10**digits)
    | st.sampled_from(["inf", "\ud800", "a\0b", "8"])
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)
objects = st.recursive(values, lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=6), max_leaves=12)
json_objects = st.dictionaries(
    st.sampled_from(KEYS),
    st.none()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec="utf-8"))
    | st.dictionaries(st.text(), st.none()),
)


def paths(data: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key, objects included."""
    for key, value in data.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def with_value(data: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return changed


def shuffled(data: Any, chance: random.Random) -> Any:
    if not isinstance(data, dict):
        return data
    keys = list(data)
    chance.shuffle(keys)
    return {key: shuffled(data[key], chance) for key in keys}


def assert_spec_or_clear_error(data: object) -> None:
    try:
        spec = decode_spec(data) if isinstance(data, bytes) else spec_from_data(data)
    except SpecError as error:
        faults = error.faults
    else:
        assert decode_spec(encode_spec(spec)) == spec
        return
    assert faults
    assert all("got " in fault and "; expected " in fault for fault in faults)


@given(objects)
def test_any_data_is_a_spec_or_one_clear_error(data: object) -> None:
    assert_spec_or_clear_error(data)


@given(specs(), st.data())
def test_any_value_in_any_place_of_a_spec_is_accepted_or_explained(spec: Spec, data: st.DataObject) -> None:
    plain = spec_to_data(spec)
    path = data.draw(st.sampled_from(sorted(paths(plain))))
    assert_spec_or_clear_error(with_value(plain, path, data.draw(values)))


@given(st.binary() | st.text().map(str.encode) | json_objects.map(lambda data: json.dumps(data).encode()))
def test_any_bytes_are_a_spec_or_one_clear_error(data: bytes) -> None:
    assert_spec_or_clear_error(data)


@given(specs(), st.randoms(use_true_random=False))
def test_the_name_ignores_order_spelling_and_the_run_half(spec: Spec, chance: random.Random) -> None:
    plain = shuffled(spec_to_data(spec), chance)
    noise = plain["task"]["noise_variance"]
    if noise == int(noise):
        plain["task"]["noise_variance"] = int(noise)
    plain["run"]["store"] = "elsewhere"
    plain["run"]["log_every"] = 7
    assert run_name(decode_spec(json.dumps(plain, indent=chance.choice([None, 4])).encode())) == run_name(spec)


@given(specs(), specs(), st.data())
def test_any_other_what_half_has_another_name(spec: Spec, other: Spec, data: st.DataObject) -> None:
    mine, theirs = spec_to_data(spec), spec_to_data(other)
    path = data.draw(st.sampled_from(sorted(path for path in paths(mine) if path[0] != "run")))
    value: Any = theirs
    for key in path:
        value = value[key]
    try:
        changed = spec_from_data(with_value(mine, path, value))
    except SpecError:
        assume(False)
    assert (run_name(changed) == run_name(spec)) == (encode_spec(changed) == encode_spec(spec))
