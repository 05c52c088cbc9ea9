"""Runs as a notebook sees them: train one, open one, read its parameters, model, metrics and data."""

from collections.abc import Callable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor, nn

from icl.core.backend import Tree
from icl.core.model import predict
from icl.core.spec import ModelSpec, Spec
from icl.core.tasks import sample_evaluation_batch, sample_task_pool
from icl.io.codec import load_spec, with_run
from icl.io.manifest import RunSummary
from icl.io.manifest import list_runs as _list_runs
from icl.io.rundir import RunDir, read_run
from icl.io.store import open_store
from icl.loop import execute

if TYPE_CHECKING:
    import pandas as pd


@attrs.frozen
class Run:
    """A run in a store: a view of what is saved there, read when asked for."""

    spec: Spec
    _directory: RunDir

    @property
    def name(self) -> str:
        """The run's name: a slug and the hash of everything that defines the experiment."""
        return self._directory.name

    @property
    def status(self) -> str:
        """ "complete" or "incomplete", from what is in the store."""
        return self._directory.manifest.status()

    @property
    def steps(self) -> list[int]:
        """The steps whose parameters are saved, ascending; step s holds s updates."""
        return self._directory.checkpoint_steps()

    def params(self, step: int) -> Tree:
        """The parameters after `step` updates: float32 CPU tensors by name.

        Raises: CheckpointError when that step is not saved or its file is damaged.
        """
        return self._directory.load_checkpoint(step)

    def model(self, step: int) -> "Predictor":
        """The model after `step` updates; `model(xs, ys)` is exactly `predict(spec.model, params, xs, ys)`."""
        return Predictor(self.spec.model, self.params(step))

    def attempts(self) -> list[dict[str, Any]]:
        """The manifest: when, where and with what each attempt began, and what those that ended counted."""
        return self._directory.manifest.attempts()

    def metrics(self) -> "pd.DataFrame":
        """One row a step that has any metric, indexed by `step`, one column a metric (see `icl.core.metrics`).

        Raises: ModuleNotFoundError without pandas, CheckpointError when a segment is damaged or two of them disagree.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "metrics: got no pandas; expected it beside icl. In the clone: pip install -e '.[notebook]'."
            ) from None

        table: pd.DataFrame = pd.DataFrame.from_dict(self._directory.metrics(), orient="index").rename_axis("step")
        return table

    def task_pool(self) -> Tensor | None:
        """The (M, D) pretraining tasks, or None for Gaussian tasks."""
        return sample_task_pool(self.spec)

    def evaluation_batch(self, evaluation_set: str) -> Tree:
        """The fixed batch, xs (B, K, D) and ys (B, K, 1), of the set "pretrain" or "true"."""
        return sample_evaluation_batch(self.spec, evaluation_set, self.task_pool())


class Predictor(nn.Module):
    """The trained transformer as a module: the same outputs as `predict`, the same parameter names as a checkpoint."""

    def __init__(self, model: ModelSpec, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._model = model
        for name, value in params.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(value.clone()))

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        """The prediction (B, K, 1) of every y from the examples before it; xs (B, K, D), ys (B, K, 1)."""
        return predict(self._model, dict(self.named_parameters()), xs, ys)


def train(
    spec: "Spec | Mapping[str, Any] | str | PathLike[str]",
    *,
    backend: str | None = None,
    store: str | None = None,
    allow_backend_change: bool = False,
    progress: Callable[[int, Mapping[str, float]], None] = lambda step, row: None,
) -> Run:
    """Train a spec to its end, going on from whatever its store holds, and return the run.

    Args:
        spec: a Spec, plain data, or the path of a JSON file.
        backend, store: override the spec's `run.backend` and `run.store`; neither changes the run's name.
        allow_backend_change: go on from a state that another backend computed.
        progress: called with the step and its new metrics.

    Raises: SpecError, BackendUnavailableError, StoreError, CheckpointError, NonFiniteLossError.
    """
    resolved = with_run(load_spec(spec), backend=backend, store=store)
    outcome = execute(resolved, allow_backend_change=allow_backend_change, progress=progress)
    return load_run(outcome.store, outcome.run)


def load_run(store: str, name: str) -> Run:
    """The run of that name in a store (a local path or any fsspec URL).

    Raises: StoreError when the store or the run is not there; CheckpointError when what is there is not the run.
    """
    directory, spec = read_run(open_store(store, create=False), name)
    return Run(spec, directory)


def list_runs(store: str) -> list[RunSummary]:
    """Name, status and newest step of every run in a store."""
    return _list_runs(open_store(store, create=False))
