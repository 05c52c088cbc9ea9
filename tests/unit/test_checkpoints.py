"""Tensor files (`icl.io.tensors`): bit-exact, deterministic, and damaged ones always found."""

import io
import pickle
import struct
import subprocess
import sys
import zipfile

import orjson
import pytest
import torch
from torch import Tensor

from icl.io.errors import CheckpointError, StoreConflictError
from icl.io.store import Store, open_store
from icl.io.tensors import pack, publish, unpack

TENSORS = {
    "weights": torch.tensor([[1.0, -0.0], [float("nan"), float("inf")]]),
    "payload": torch.tensor([0x7FC12345, 0x7F812345], dtype=torch.int32).view(
        torch.float32
    ),  # two NaNs, one signalling
    "step": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 2),
}
METADATA = {"step": "3", "backend": '{"name": "cpu"}'}
DATA = pack(TENSORS, METADATA)


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def bits(tree: dict[str, Tensor]) -> dict[str, tuple[object, ...]]:
        return {name: (x.dtype, tuple(x.shape), x.contiguous().numpy().tobytes()) for name, x in tree.items()}

    return bits(a) == bits(b)


def loads_as_written_or_is_refused(data: bytes) -> bool:
    try:
        tensors, metadata = unpack(data, "f")
    except CheckpointError as error:
        return str(error).startswith("f: got ")
    return same_bits(tensors, unpack(DATA, "f")[0]) and metadata == unpack(DATA, "f")[1]


def test_every_bit_returns_also_of_nan_payloads() -> None:
    tensors, metadata = unpack(DATA, "f")
    assert same_bits(tensors, TENSORS)
    assert METADATA.items() <= metadata.items()


def test_equal_input_gives_equal_bytes_in_any_order() -> None:
    assert pack(dict(reversed(TENSORS.items())), dict(reversed(METADATA.items()))) == DATA


def test_equal_input_gives_equal_bytes_in_another_process() -> None:
    script = (
        "import sys, torch; from icl.io.tensors import pack; "
        "sys.stdout.buffer.write(pack({'a': torch.arange(3.0), 'b': torch.ones(2)}, {'x': '1', 'y': '2', 'z': '3'}))"
    )
    elsewhere = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    assert elsewhere == pack({"a": torch.arange(3.0), "b": torch.ones(2)}, {"x": "1", "y": "2", "z": "3"})


def test_tensors_come_in_the_order_of_their_names() -> None:
    names = [f"blocks.{index}" for index in range(50)]
    tensors, _ = unpack(pack({name: torch.ones(1) for name in reversed(names)}, {}), "f")
    assert list(tensors) == sorted(names)


def test_every_flipped_bit_is_found_or_harmless() -> None:
    for position in range(len(DATA)):
        for bit in range(8):
            damaged = bytearray(DATA)
            damaged[position] ^= 1 << bit
            assert loads_as_written_or_is_refused(bytes(damaged)), (position, bit)


def test_every_truncation_is_refused() -> None:
    """Fault 45 and fault 73: half a file is never taken for a whole one."""
    for length in range(len(DATA)):
        with pytest.raises(CheckpointError, match=r"^f: got "):
            unpack(DATA[:length], "f")
    with pytest.raises(CheckpointError):
        unpack(DATA + b"\0", "f")


class Trap:
    """Unpickling this ends the process."""

    def __reduce__(self) -> tuple[object, ...]:
        return (sys.exit, ("unpickled",))


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return buffer.getvalue()


def header(value: object, body: bytes = b"") -> bytes:
    text = orjson.dumps(value)
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Trap()),
        zipped(pickle.dumps(Trap())),
        b"",
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        struct.pack("<Q", 2**63) + DATA[8:],
        struct.pack("<Q", 10**9) + DATA[8:],
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        header([]),
        header(None),
        header({"__metadata__": {"icl": "[]"}}),
        header({"__metadata__": {"icl": '{"metadata": {}, "sha256": "0"}'}}),
        header(
            {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)
        ),
        header(
            {"__metadata__": {"icl": '{"metadata":{}}'}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}
        ),
        header(
            {
                "__metadata__": {"icl": '{"metadata":{},"sha256":""}'},
                "a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
            }
        ),
        header(
            {
                "__metadata__": {"icl": '{"metadata":{},"sha256":""}'},
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            },
            bytes(4),
        ),
    ],
    ids=lambda data: repr(data[:8]),
)
def test_a_foreign_file_is_refused_without_being_run(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="It is damaged"):
        unpack(data, "f")


def test_loading_needs_no_accelerator() -> None:
    """Fault 21: reading a file touches no device and imports no torch_xla."""
    script = (
        "import sys, torch; from icl.io.tensors import pack, unpack\n"
        "tensors, _ = unpack(pack({'a': torch.ones(2)}, {}), 'f')\n"
        "assert tensors['a'].device.type == 'cpu' and 'torch_xla' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_second_writer_of_equal_tensors_agrees_whoever_it_is(store: Store) -> None:
    publish(store, "run/a", TENSORS, METADATA)
    publish(store, "run/a", TENSORS, {**METADATA, "backend": "another host"})
    assert unpack(store.read("run/a"), "a")[1]["backend"] == METADATA["backend"]


def test_a_second_writer_of_other_tensors_is_named_beside_the_first(store: Store) -> None:
    publish(store, "run/a", TENSORS, {"backend": "one"})
    before = store.read("run/a")
    pattern = r"run/a: got tensors with SHA-256 [0-9a-f]{64} from two; expected [0-9a-f]{64}, published before from one"
    with pytest.raises(StoreConflictError, match=pattern):
        publish(store, "run/a", {**TENSORS, "step": torch.tensor(4)}, {"backend": "two"})
    assert store.read("run/a") == before


def test_a_damaged_file_is_put_aside_and_written_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.create("run/checkpoints/a", DATA[:-1])
    publish(store, "run/checkpoints/a", TENSORS, METADATA)
    assert store.read("run/checkpoints/a") == DATA
    (aside,) = store.list("run/superseded")
    assert store.read(f"run/superseded/{aside}") == DATA[:-1]
    assert "run/checkpoints/a: got" in caplog.text
