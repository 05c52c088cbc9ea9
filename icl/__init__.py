"""icl: transformers trained on in-context linear regression, with bits that can be trusted.

The notebook surface. Importing this package imports no torch, torch_xla, wandb, gcsfs or pandas.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from icl.backends import available_backends as available_backends
    from icl.backends import get_backend as get_backend
    from icl.core.baselines import dmmse_predictions as dmmse_predictions
    from icl.core.baselines import ridge_predictions as ridge_predictions
    from icl.core.errors import SpecError as SpecError
    from icl.core.spec import Spec as Spec
    from icl.io.codec import load_spec as load_spec
    from icl.io.names import run_name as run_name
    from icl.predictor import predict as predict
    from icl.results import Run as Run
    from icl.results import list_runs as list_runs
    from icl.results import load_run as load_run
    from icl.results import train as train

_HOMES = {
    "available_backends": "icl.backends",
    "get_backend": "icl.backends",
    "dmmse_predictions": "icl.core.baselines",
    "ridge_predictions": "icl.core.baselines",
    "predict": "icl.predictor",
    "Spec": "icl.core.spec",
    "SpecError": "icl.core.errors",
    "load_spec": "icl.io.codec",
    "run_name": "icl.io.names",
    "Run": "icl.results",
    "list_runs": "icl.results",
    "load_run": "icl.results",
    "train": "icl.results",
}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'icl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
