"""The contract suite on every backend this machine has."""

import platform
import sys

import pytest

from icl.backends import available_backends, get_backend
from icl.backends.cpu import CPUBackend
from icl.core.backend import Backend
from icl.testing import BackendContract, StrictBackend
from tests.toy import ToyBackend

AVAILABLE = available_backends()
XLA_WHEELS = sys.platform == "linux" and platform.machine() == "x86_64"


class TestCPU(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return CPUBackend()


class TestStrict(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return StrictBackend()


class TestToy(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return get_backend(ToyBackend.name)


@pytest.mark.skipif(AVAILABLE["cuda"] != "available", reason=f"needs a CUDA device: {AVAILABLE['cuda']}")
class TestCUDA(BackendContract):
    # float32 kernels that add in another order: a few roundings (6e-8) in each of 5 updates of values about 1.
    tolerance = 1e-5

    @pytest.fixture
    def backend(self) -> Backend:
        return get_backend("cuda")


@pytest.mark.skipif(not XLA_WHEELS, reason="torch_xla has wheels for Linux on x86_64 only")
class TestXLA(BackendContract):
    # XLA fuses and adds in another order: a few roundings (6e-8) in each of 4 updates of values about 1.
    tolerance = 1e-5

    @pytest.fixture
    def backend(self) -> Backend:
        return get_backend("xla")
