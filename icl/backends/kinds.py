"""The kinds of device: how those of a machine are found, and how a process is given one, without any library."""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

# One thread, unless `run.threads` says more; those then sleep while they wait, since the cores are shared.
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
_FIRST_PORT = 8476  # the one libtpu itself begins with


@attrs.frozen
class DeviceKind:
    """A kind of device that a process can be given.

    Attributes:
        name: what `--devices` calls it.
        find: from the environment of this process, the ids of the devices that it may use.
        pin: from an id, the variables that give a process this device and no other, set before any library is loaded.
        is_shared: whether several processes may use one at a time. It is then counted instead of chosen, as in `cpu:2`.
    """

    name: str
    find: Callable[[Mapping[str, str]], list[str]]
    pin: Callable[[str], dict[str, str]]
    is_shared: bool = False


def _find_cores(environment: Mapping[str, str]) -> list[str]:
    return _numbers(len(os.sched_getaffinity(0)))


def _pin_cpu(index: str) -> dict[str, str]:
    return {**_THREADS, "PJRT_DEVICE": "CPU"}


def _find_gpus(environment: Mapping[str, str]) -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in environment:
        return _given(environment["CUDA_VISIBLE_DEVICES"])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return _numbers(len(re.findall(r"^GPU \d+", listed, re.MULTILINE)))


def _pin_gpu(index: str) -> dict[str, str]:
    return {**_THREADS, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": index}


def _find_chips(environment: Mapping[str, str]) -> list[str]:
    for variable in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        if variable in environment:
            return _given(environment[variable])
    return _numbers(len([*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]))


def _pin_chip(index: str) -> dict[str, str]:
    """Those of libtpu for processes that do not talk to each other, in its newer and older spellings.

    Each process has a port of its own.
    """
    port = str(_FIRST_PORT + int(index))
    return {
        **_THREADS,
        "PJRT_DEVICE": "TPU",
        "TPU_VISIBLE_CHIPS": index,
        "TPU_VISIBLE_DEVICES": index,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_PROCESS_PORT": port,
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_MESH_CONTROLLER_PORT": port,
        "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}",
        "CLOUD_TPU_TASK_ID": "0",
    }


def _given(visible: str) -> list[str]:
    """The ids in a variable that a scheduler has set."""
    return [index for index in visible.split(",") if index]


def _numbers(count: int) -> list[str]:
    return [str(index) for index in range(count)]


CPU = DeviceKind("cpu", _find_cores, _pin_cpu, is_shared=True)
CUDA = DeviceKind("cuda", _find_gpus, _pin_gpu)
TPU = DeviceKind("tpu", _find_chips, _pin_chip)
