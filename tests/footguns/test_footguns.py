"""Surprises of the libraries we stand on, pinned: when one of these fails, a workaround may be dropped or is needed."""

import fsspec
import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import save


def test_orjson_writes_infinity_as_null() -> None:
    """Why infinite task diversity is null and floats are checked before they are hashed."""
    assert orjson.dumps(float("inf")) == b"null"
    assert orjson.dumps(1) != orjson.dumps(1.0)


def test_a_linear_schedule_in_torch_divides_by_zero() -> None:
    """Why `one_cycle` has a floor under its div factor (field fault 38)."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(ZeroDivisionError):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=2, div_factor=0.0)


def test_fsspec_publishes_a_partial_object_when_a_writer_raises(tmp_path: object) -> None:
    """Why a store never writes to the final name (field faults 73 and 74)."""
    files, root = fsspec.url_to_fs(f"{tmp_path}/partial")

    def write_half() -> None:
        with files.open(root, "wb") as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert files.cat_file(root) == b"half"


def test_safetensors_keeps_several_metadata_keys_in_no_fixed_order() -> None:
    """Why a file has one metadata key: equal input must give equal bytes."""
    keys = {str(i): "x" for i in range(30)}
    assert len({save({"x": torch.zeros(1)}, keys) for _ in range(10)}) > 1
    assert len({save({"x": torch.zeros(1)}, {"icl": "x"}) for _ in range(10)}) == 1


def test_one_minus_a_power_loses_digits_near_one() -> None:
    """Why the bias correction uses expm1."""
    beta = torch.tensor(0.9999)
    plain, accurate = 1 - beta**1, -torch.expm1(torch.log(torch.tensor(0.9999, dtype=torch.float64)).float())
    assert abs(float(plain) - 1e-4) > 10 * abs(float(accurate) - 1e-4)


def test_numpy_matmul_may_round_otherwise_than_a_sum() -> None:
    """Why targets are summed in a fixed order and not by BLAS, whose kernels differ between machines."""
    rng = np.random.Generator(np.random.Philox(key=1))
    xs, ws = rng.standard_normal((4096, 16), np.float32), rng.standard_normal((16, 1), np.float32)
    fixed = np.zeros((4096,), np.float32)
    for d in range(16):
        fixed += xs[:, d] * ws[d, 0]
    assert (fixed != (xs @ ws)[:, 0]).any()


def test_inference_mode_makes_tensors_that_cannot_be_trained() -> None:
    """Why backends leave inference mode before they make a tensor."""
    with torch.inference_mode():
        weight = torch.ones(2)
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors"):
        torch.autograd.backward((leaf * weight).sum())
