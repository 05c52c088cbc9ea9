"""One thread a process, Hypothesis profiles (fast, ci, thorough by HYPOTHESIS_PROFILE), and fresh stores."""

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.emulator import BUCKET, Emulator, Proxy, behind_proxy, emulator

# Models this small gain nothing from a second thread, and threads that wait for each other on a busy machine lose much.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PJRT_DEVICE"] = "CPU"  # the real XLA, on this processor
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell without job control
    signal.signal(signal.SIGINT, signal.default_int_handler)

common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("fast", max_examples=25, **common)  # type: ignore[arg-type]
settings.register_profile("ci", max_examples=25, derandomize=True, **common)  # type: ignore[arg-type]
settings.register_profile("thorough", max_examples=500, **common)  # type: ignore[arg-type]
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "fast"))


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """The GCS emulator that this session's gs:// URLs lead to."""
    with emulator(tmp_path_factory.mktemp("emulator")) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server


@pytest.fixture
def gcs_proxy(gcs: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the emulator, to which this test's gs:// URLs lead."""
    with behind_proxy(gcs, monkeypatch) as server:
        yield server


@pytest.fixture(params=["local", "memory", "gcs"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh store of each kind."""
    if request.param == "local":
        yield str(tmp_path / "store")
    elif request.param == "gcs":
        request.getfixturevalue("gcs")
        yield f"gs://{BUCKET}/{uuid.uuid4().hex}"
    else:
        url = f"memory://{uuid.uuid4().hex}"
        yield url
        files, root = fsspec.url_to_fs(url)
        if files.exists(root):
            files.rm(root, recursive=True)
