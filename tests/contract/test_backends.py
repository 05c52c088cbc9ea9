"""The contract suite on every backend this machine has."""

import pytest

from icl.backends import available_backends, get_backend
from icl.backends.cpu import CPUBackend
from icl.core.backend import Backend
from icl.testing import BackendContract, StrictBackend

CUDA = available_backends()["cuda"]


class TestCPU(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return CPUBackend()


class TestStrict(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return StrictBackend()


@pytest.mark.skipif(CUDA != "available", reason=f"needs a CUDA device: {CUDA}")
class TestCUDA(BackendContract):
    # float32 kernels that add in another order: a few roundings (6e-8) in each of 5 updates of values about 1.
    tolerance = 1e-5

    @pytest.fixture
    def backend(self) -> Backend:
        return get_backend("cuda")
