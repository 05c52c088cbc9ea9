"""The surface that users depend on."""

import pytest
import torch

import icl
from icl.backends import available_backends, get_backend
from icl.core.errors import BackendUnavailableError
from icl.testing import StrictBackend


def test_the_notebook_surface() -> None:
    assert dir(icl) == [
        "Run",
        "Spec",
        "SpecError",
        "available_backends",
        "dmmse_predictions",
        "get_backend",
        "list_runs",
        "load_run",
        "load_spec",
        "predict",
        "ridge_predictions",
        "run_name",
        "train",
    ]
    assert all(callable(getattr(icl, name)) for name in dir(icl))


def test_missing_backends_say_what_to_do() -> None:
    """Field fault 27: never a silent fall-back."""
    found = available_backends()
    assert found["cpu"] == "available"
    for name in (name for name, reason in found.items() if reason != "available"):
        with pytest.raises(BackendUnavailableError, match="expected") as caught:
            get_backend(name)
        assert str(caught.value) == found[name]
    with pytest.raises(BackendUnavailableError, match="expected one of cpu, cuda"):
        get_backend("tpu9")
    with pytest.raises(BackendUnavailableError, match="matmul_precision"):
        get_backend("cpu", matmul_precision="high")


class Trap:
    """Is no backend, and says when it is called."""

    def __init__(self, *_: object) -> None:
        pytest.fail("called")


_NO_BACKENDS = ("os:system", "os.path:join", "subprocess:Popen", "builtins:dict", "string:digits")
_OF_OURS = (f"{__name__}:Trap", "icl.core.backend:Backend", "icl.core.backend:Tree", "icl.backends:get_backend")


@pytest.mark.parametrize("name", [*_NO_BACKENDS, *_OF_OURS])
def test_what_is_no_backend_is_never_called(name: str) -> None:
    """A name leads to anything that Python has, and what is called gets two arguments."""
    with pytest.raises(BackendUnavailableError, match=f"backend {name}: got .*; expected a class that keeps"):
        get_backend(name)


def test_the_strict_backend_catches_what_it_is_for() -> None:
    backend = StrictBackend()
    tree = {"x": torch.ones(2)}
    backend.compile(lambda t: {"y": t["x"] * float(t["x"][0])})(tree)
    assert backend.host_reads > 0
    with pytest.raises(AssertionError, match="global random generator"):
        backend.compile(lambda t: {"y": torch.rand(2)})(tree)
    with pytest.raises(AssertionError, match="shares memory"):
        backend.compile_steps(lambda s, b: (s, {"m": b["x"].sum()}), num_steps=2)(tree, {"x": torch.ones(2, 1)}, 2)
    state = {"x": torch.ones(2)}
    backend.compile_steps(lambda s, b: ({"x": s["x"] + b["x"]}, {"m": b["x"].sum()}), num_steps=2)(
        state, {"x": torch.ones(2, 1)}, 2
    )
    assert state["x"].isnan().all()
