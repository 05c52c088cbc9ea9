"""Laws of stores, tensor files and metrics, for whatever Hypothesis thinks of."""

import uuid

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from icl.core.families.linear import LinearTask
from icl.core.metrics import TRAINING_LOSS
from icl.core.spec import Spec, TrainingSpec
from icl.io.errors import CheckpointError, MissingObjectError
from icl.io.rundir import open_run
from icl.io.store import open_store
from icl.io.tensors import pack, unpack
from tests.trees import METADATA

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
SPEC = Spec(task=LinearTask(task_dim=2, num_examples=2), training=TrainingSpec(total_steps=64))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A CPU tensor of any bits: every NaN, infinity and subnormal of its dtype may occur."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    bits = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype=np.uint8).copy()
    return torch.from_numpy(bits).view(dtype).reshape(shape)


trees = st.dictionaries(st.text('abc.ü"\\', min_size=1, max_size=6), tensors(), max_size=4)
metadata = st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4)


def bits(value: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(trees, metadata)
def test_a_file_returns_every_bit_and_word(tree: dict[str, torch.Tensor], words: dict[str, str]) -> None:
    loaded, said = unpack(pack(tree, words), "f")
    assert {name: bits(value) for name, value in loaded.items()} == {name: bits(value) for name, value in tree.items()}
    assert {**words, "tensors_sha256": said["tensors_sha256"]} == said


@given(trees, metadata)
def test_the_bytes_do_not_depend_on_order(tree: dict[str, torch.Tensor], words: dict[str, str]) -> None:
    assert pack(dict(reversed(tree.items())), dict(reversed(words.items()))) == pack(tree, words)


@given(trees, metadata, st.data())
def test_a_changed_byte_is_found_or_harmless(
    tree: dict[str, torch.Tensor], words: dict[str, str], data: st.DataObject
) -> None:
    written = pack(tree, words)
    damaged = bytearray(written)
    damaged[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    try:
        loaded, said = unpack(bytes(damaged), "f")
    except CheckpointError:
        return
    before, wrote = unpack(written, "f")
    assert said == wrote
    assert {name: bits(value) for name, value in loaded.items()} == {n: bits(v) for n, v in before.items()}


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="It is damaged"):
        unpack(data, "f")


paths = st.sampled_from(["a", "b", "run/a", "run/b", "run/deep/a"])
operations = st.one_of(st.tuples(st.just("create"), paths, st.binary(max_size=3)), st.tuples(st.just("delete"), paths))


@given(st.lists(operations, max_size=20))
def test_a_store_is_a_dictionary_in_which_the_first_value_stays(
    store_url: str, steps: list[tuple[str, str] | tuple[str, str, bytes]]
) -> None:
    store = open_store(f"{store_url}/{uuid.uuid4().hex}")
    model: dict[str, bytes] = {}
    for step in steps:
        if len(step) == 3:
            assert store.create(step[1], step[2]) == (step[1] not in model)
            model.setdefault(step[1], step[2])
        else:
            store.delete(step[1])
            model.pop(step[1], None)
        for path in ("a", "b", "run/a", "run/b", "run/deep/a"):
            if path not in model:
                with pytest.raises(MissingObjectError):
                    store.read(path)
        assert {path: store.read(path) for path in model} == model
    inside = {path.removeprefix("run/") for path in model if path.startswith("run/") and path.count("/") == 1}
    assert inside == set(store.list("run")) - {"deep"}


@given(st.lists(st.tuples(st.integers(0, 63), st.integers(1, 20)), min_size=1, max_size=6))
def test_metrics_are_the_union_of_segments(pieces: list[tuple[int, int]]) -> None:
    """Whatever interruptions made segments overlap, each step has one row, in order."""
    run = open_run(open_store(f"memory://{uuid.uuid4().hex}"), SPEC)
    expected: dict[int, dict[str, float]] = {}
    for start, length in pieces:
        stop = min(start + length, 64)
        losses = torch.arange(start + 1, stop + 1, dtype=torch.float32) / 7
        run.save_segment(start, stop, losses, {}, METADATA)
        expected |= {step: {TRAINING_LOSS: float(losses[step - start - 1])} for step in range(start + 1, stop + 1)}
    rows = run.metrics()
    assert list(rows) == sorted(expected)
    assert rows == expected


@given(st.sets(st.integers(0, 10**12 - 1), min_size=1, max_size=30))
def test_steps_are_listed_by_number(steps: set[int]) -> None:
    run = open_run(open_store(f"memory://{uuid.uuid4().hex}"), SPEC)
    for step in steps:
        run.store.create(f"{run.name}/checkpoints/step-{step:012d}.safetensors", b"")
    assert run.checkpoint_steps() == sorted(steps)
