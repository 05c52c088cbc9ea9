"""The devices of this machine, each for one process: how to name, find, pin and hold them."""

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import attrs

from icl.backends import backend_of_kind, device_kinds, kinds_of
from icl.core.errors import BackendUnavailableError, SpecError
from icl.core.spec import RunSpec
from icl.io.errors import StoreError

_DEFAULT_BACKEND = RunSpec().backend


@attrs.frozen
class Device:
    """A TPU chip, a GPU or a share of the processor.

    Attributes:
        kind: the name of an `icl.backends.kinds.DeviceKind`: cpu, cuda, tpu or one that a further backend brings.
        id: what its driver calls it.
    """

    kind: str
    id: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.id}"

    def backend(self, asked: str) -> str:
        """The backend that trains here: see `backend_on`."""
        return backend_on(self.kind, asked)

    def environment(self) -> dict[str, str]:
        """The variables that give a process this device and no other, to be set before any library is loaded."""
        return device_kinds()[self.kind].pin(self.id)


def parse_devices(text: str, environment: Mapping[str, str] = os.environ) -> list[Device]:
    """The devices that "tpu:0-3", "cuda:all", "cuda:0,2" or "cpu:2" name; `cpu:2` is two shares of one thread each.

    Raises: SpecError for other texts; BackendUnavailableError for devices that this machine does not have.
    """
    name, _, asked = text.partition(":")
    kind = device_kinds().get(name)
    if kind is None or not re.fullmatch(r"\w+(:(all|\d[\d,-]*))?", text):
        raise SpecError(f"--devices: got {text!r}; expected such as tpu:0-3, cuda:all, cuda:0,2 or cpu:2.")
    what = asked or "all"
    if kind.is_shared and what != "all":
        if not what.isdecimal() or not 0 < int(what) <= 1024:
            raise SpecError(f"--devices: got {text!r}; expected a number of processes from 1 to 1024, as in {name}:2.")
        return [Device(name, str(index)) for index in range(int(what))]
    found = [Device(name, index) for index in kind.find(environment)]
    if not found:
        raise BackendUnavailableError(
            f"--devices: got {text}; expected a machine that has one, and there is none here."
        )
    if what == "all":
        return found
    chosen = [str(index) for index in _indices(what, text)]
    missing = [index for index in chosen if index not in {device.id for device in found}]
    if missing:
        there = ", ".join(map(str, found))
        raise BackendUnavailableError(f"--devices: got {name}:{missing[0]}; expected one of those here: {there}.")
    return [Device(name, index) for index in chosen]


def backend_on(kind: str, asked: str) -> str:
    """The backend that trains on such a device a spec whose `run.backend` is `asked`; never another than asked.

    Only "cpu", the default, which cannot be told from nothing asked, gives way to the device's own backend.

    Raises: SpecError when what is asked for cannot run there, or is unknown.
    """
    kinds = _kinds_of(asked)
    if kinds is None or kind in kinds:
        return asked
    own = backend_of_kind(kind)
    if asked == _DEFAULT_BACKEND:
        return own
    raise SpecError(
        f"run.backend: got {asked!r} with --devices {kind}; expected {own!r} there, or --devices "
        f"{' or '.join(kinds)}. Correct one of them."
    )


def default_kind(backend: str, environment: Mapping[str, str] = os.environ) -> str:
    """The kind of device for specs that ask for `backend`; never another instead."""
    kinds = _kinds_of(backend)
    if kinds is None:
        raise SpecError(f"run.backend: got {backend!r}, which runs on any device; expected --devices with it. Add it.")
    if environment.get("PJRT_DEVICE") == "CPU" and "tpu" in kinds and "cpu" in kinds:
        return "cpu"
    return kinds[0]


def default_devices(backend: str, environment: Mapping[str, str] = os.environ) -> list[Device]:
    """Every device here of that kind."""
    return parse_devices(default_kind(backend, environment), environment)


@contextmanager
def reserved(devices: Sequence[Device]) -> Iterator[list[int]]:
    """Reserve chips and GPUs while inside, and as long as a process lives that inherits the file descriptors given.

    Raises: BackendUnavailableError when another process of this user holds one; StoreError where no file can be kept.
    """
    alone = [device for device in devices if not device_kinds()[device.kind].is_shared]
    with ExitStack() as stack:
        yield _reserve(stack, alone) if alone else []


def _reserve(stack: ExitStack, devices: Sequence[Device]) -> list[int]:
    try:
        folder = Path(tempfile.gettempdir()) / f"icl-devices-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        files = [stack.enter_context(_locked(folder / f"{device.kind}-{device.id}.lock", device)) for device in devices]
    except OSError as error:
        raise StoreError(
            f"--devices: got no place for the files that say who holds them ({error}); expected a folder for temporary "
            "files that can be written. Free some room, or set TMPDIR."
        ) from None
    return [file.fileno() for file in files]


@contextmanager
def _locked(path: Path, device: Device) -> Iterator[IO[str]]:
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BackendUnavailableError(
                f"--devices: got {device}, which process {file.read().strip() or 'unknown'} holds; expected one "
                "that is free. Stop that sweep (--stop), or name other devices."
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file


def _kinds_of(backend: str) -> tuple[str, ...] | None:
    try:
        return kinds_of(backend)
    except BackendUnavailableError as error:
        raise SpecError(f"run.{error}") from None


def _indices(what: str, text: str) -> list[int]:
    chosen: list[int] = []
    for part in what.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise SpecError(f"--devices: got {text!r}; expected numbers and ranges such as 0-3 or 0,2.")
        chosen += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(chosen)) < len(chosen):
        raise SpecError(f"--devices: got {text!r}; expected each device once.")
    return chosen
