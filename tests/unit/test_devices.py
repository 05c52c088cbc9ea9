"""Devices: how they are named, found, pinned and reserved."""

import subprocess
import sys
from pathlib import Path

import pytest

from icl import backends
from icl.backends.kinds import DeviceKind
from icl.core.errors import BackendUnavailableError, SpecError
from icl.engines.devices import Device, backend_on, default_devices, default_kind, parse_devices, reserved
from icl.io.errors import StoreError

TPUS = {"TPU_VISIBLE_CHIPS": "0,1,2,3"}


def test_four_chips_are_four_disjoint_environments() -> None:
    """Field fault 26: one chip and one port a process, in the newer and the older spelling."""
    environments = [device.environment() for device in parse_devices("tpu:all", TPUS)]
    assert [each["TPU_VISIBLE_CHIPS"] for each in environments] == ["0", "1", "2", "3"]
    for each in environments:
        assert each["PJRT_DEVICE"] == "TPU"
        assert each["TPU_VISIBLE_DEVICES"] == each["TPU_VISIBLE_CHIPS"]
        assert each["TPU_PROCESS_ADDRESSES"] == f"localhost:{each['TPU_PROCESS_PORT']}"
        assert each["TPU_MESH_CONTROLLER_ADDRESS"] == f"localhost:{each['TPU_MESH_CONTROLLER_PORT']}"
        bounds = {value for key, value in each.items() if key.endswith("_BOUNDS")}
        assert bounds == {"1,1,1"}
    assert len({each["TPU_PROCESS_PORT"] for each in environments}) == 4


def test_gpus_are_disjoint_and_those_that_a_scheduler_gave() -> None:
    """Field fault 64."""
    devices = parse_devices("cuda", {"CUDA_VISIBLE_DEVICES": "2,GPU-5e"})
    assert [device.environment()["CUDA_VISIBLE_DEVICES"] for device in devices] == ["2", "GPU-5e"]


def test_processor_shares_have_one_thread_each() -> None:
    assert [str(device) for device in parse_devices("cpu:3")] == ["cpu:0", "cpu:1", "cpu:2"]
    assert parse_devices("cpu:1")[0].environment()["OMP_NUM_THREADS"] == "1"
    assert len(parse_devices("cpu")) >= 1


@pytest.mark.parametrize(
    ("text", "named"), [("tpu:0-2", "012"), ("tpu:1,3", "13"), ("tpu:all", "0123"), ("tpu:3", "3")]
)
def test_ranges_and_lists(text: str, named: str) -> None:
    assert "".join(device.id for device in parse_devices(text, TPUS)) == named


@pytest.mark.parametrize("text", ["gpu:0", "tpu:", "tpu:x", "tpu:3-1", "tpu:0,0", "tpu:0-", "cpu:0", "cpu:1-2", ""])
def test_what_names_no_device_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--devices: got"):
        parse_devices(text, TPUS)


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(BackendUnavailableError, match=r"tpu:7; expected one of those here: tpu:0, .*tpu:3"):
        parse_devices("tpu:7", TPUS)
    with pytest.raises(BackendUnavailableError, match="there is none here"):
        parse_devices("cuda", {"CUDA_VISIBLE_DEVICES": ""})


def test_the_spec_decides_the_kind_and_nothing_falls_back() -> None:
    """Field fault 27."""
    assert default_kind("xla", {}) == "tpu"
    assert default_kind("xla", {"PJRT_DEVICE": "CPU"}) == "cpu"
    assert default_kind("cuda", {}) == "cuda"
    with pytest.raises(SpecError, match=r"run\.backend: got 'tpu9'; expected one of cpu, cuda, xla"):
        default_kind("tpu9", {})


@pytest.mark.parametrize("kind", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("asked", ["cpu", "cuda", "xla", "tpu9"])
def test_a_backend_is_never_replaced_by_another_than_the_devices_own(kind: str, asked: str) -> None:
    """Only "cpu", the default, which cannot be told from nothing asked, gives way."""
    trains = {
        ("cpu", "cpu"): "cpu",
        ("cpu", "xla"): "xla",
        ("cuda", "cpu"): "cuda",
        ("cuda", "cuda"): "cuda",
        ("tpu", "cpu"): "xla",
        ("tpu", "xla"): "xla",
    }
    if (kind, asked) in trains:
        assert backend_on(kind, asked) == trains[kind, asked]
        return
    with pytest.raises(SpecError, match=rf"run\.backend: got '{asked}'.*expected"):
        backend_on(kind, asked)


def test_a_backend_of_another_package_trains_on_the_devices_that_it_is_given() -> None:
    assert backend_on("cuda", "package.module:Class") == "package.module:Class"
    with pytest.raises(SpecError, match="expected --devices with it"):
        default_kind("package.module:Class", {})


def test_a_further_entry_brings_its_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry in the table of backends, and sweeps find, name and pin what it runs on."""
    npu = DeviceKind("npu", lambda environment: ["0", "1"], lambda index: {"NPU_VISIBLE": index})
    monkeypatch.setitem(backends.BACKENDS, "fourth", backends.Entry(backends.BACKENDS["cpu"].adapter, (npu,)))
    assert [device.environment() for device in parse_devices("npu:0,1")] == [{"NPU_VISIBLE": "0"}, {"NPU_VISIBLE": "1"}]
    assert list(map(str, default_devices("fourth", {}))) == ["npu:0", "npu:1"]
    assert (backend_on("npu", "fourth"), backend_on("npu", "cpu")) == ("fourth", "fourth")
    with pytest.raises(SpecError, match=r"got 'fourth' with --devices cpu; expected 'cpu' there, or --devices npu"):
        backend_on("cpu", "fourth")


HOLD = """
import sys
from icl.engines.devices import Device, reserved
with reserved([Device("tpu", "1")]):
    print("reserved", flush=True)
    sys.stdin.read()
"""


def test_a_device_that_another_process_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field fault 26: a second launch on a used chip is refused; a death frees it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "reserved\n"
        with reserved([Device("tpu", "0"), Device("cpu", "1")]):
            pass
        refused = pytest.raises(BackendUnavailableError, match=f"tpu:1, which process {other.pid} holds")
        with refused, reserved([Device("tpu", "0"), Device("tpu", "1")]):
            raise AssertionError
        other.kill()
    with reserved([Device("tpu", "1")]):
        pass


def test_the_processor_needs_no_lock_and_a_chip_without_room_for_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with reserved([Device("cpu", "0")]) as keep:
        assert keep == []
    with pytest.raises(StoreError, match="set TMPDIR"), reserved([Device("tpu", "0")]):
        raise AssertionError
