"""Runs as a notebook sees them: train one, open one, read its parameters, model, metrics and data."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import index
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from icl.backends.numerics import pinned_numerics
from icl.core.backend import Tree
from icl.core.metrics import with_limits
from icl.core.spec import Spec
from icl.core.tasks import sample_evaluation_batch, sample_task_pool, sample_training_batch
from icl.io.codec import load_spec, with_run
from icl.io.lookup import find_run
from icl.io.manifest import RunSummary
from icl.io.manifest import list_runs as _list_runs
from icl.io.names import natural_order
from icl.io.rundir import RunDir, read_run
from icl.io.store import open_store
from icl.loop import execute
from icl.predictor import Predictor
from icl.progress import Deferred, Progress, progress_bar
from icl.stopping import interruptible

if TYPE_CHECKING:
    import pandas as pd


@attrs.frozen(repr=False)
class Run:
    """A run in a store: a view of what is saved there, read when asked for."""

    spec: Spec
    _directory: RunDir

    def __repr__(self) -> str:
        return f"<Run {self.name} in {self._directory.store.url}>"

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

    @pinned_numerics()
    def params(self, step: int) -> Tree:
        """The parameters after `step` updates: float32 CPU tensors by name, in the order of `parameter_shapes`.

        Raises: CheckpointError when that step is not saved or its file is damaged.
        """
        return self._directory.load_checkpoint(_as_step("params", step))

    @pinned_numerics()
    def model(self, step: int) -> Predictor:
        """The model after `step` updates; `model(xs, ys)` is exactly `predict(spec.model, params, xs, ys)`."""
        return Predictor(self.spec, self.params(step))

    def attempts(self) -> list[dict[str, Any]]:
        """The manifest: when, where and with what each attempt began, and what those that ended counted."""
        return self._directory.manifest.attempts()

    @pinned_numerics()
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

        rows = {step: with_limits(self.spec.task, row) for step, row in self._directory.metrics().items()}
        columns = sorted({name for row in rows.values() for name in row}, key=natural_order)
        table: pd.DataFrame = pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("step")
        return table

    @pinned_numerics()
    def task_pool(self) -> Tensor | None:
        """The (M, D) pretraining tasks, or None for Gaussian tasks."""
        return sample_task_pool(self.spec)

    @pinned_numerics()
    def evaluation_batch(self, evaluation_set: str) -> Tree:
        """The fixed batch of the set "pretrain" or "true": xs (B, K, D), ys (B, K, 1), and the tasks, ws (B, D)."""
        return sample_evaluation_batch(self.spec, evaluation_set, self.task_pool())

    @pinned_numerics()
    def training_batch(self, step: int) -> Tree:
        """The batch on which the model after `step` updates is trained: xs (B, K, D), ys (B, K, 1), ws (B, D).

        Law: the loss of `model(step)` on it is `train/loss` in row `step + 1` of `metrics()`, up to rounding.

        Raises: ValueError for a step that is not trained, or a run whose device draws its own batches.
        """
        total = self.spec.training.total_steps
        if self.spec.training.sampling == "device":
            raise ValueError(
                'training_batch: got a run with training.sampling="device"; expected "host". Such batches are drawn by '
                "the device's own generator while it trains, and cannot be drawn again elsewhere."
            )
        step = _as_step("training_batch", step)
        if not 0 <= step < total:
            raise ValueError(
                f"training_batch: got step {step}; expected one from 0 to {total - 1}. The model after the last of "
                f"{total} updates is trained no further."
            )
        return sample_training_batch(self.spec, step, self.task_pool())


def train(
    spec: "Spec | Mapping[str, Any] | str | PathLike[str]",
    *,
    backend: str | None = None,
    store: str | PathLike[str] | None = None,
    allow_backend_change: bool = False,
    progress: Progress | bool | None = None,
) -> Run:
    """Train a spec to its end, going on from whatever its store holds, and return the run.

    Ctrl-C, or interrupting the kernel, saves at the end of the chunk and raises KeyboardInterrupt; a second one raises
    it at once. The handler of SIGINT that was there before is not called meanwhile, and is put back.

    Args:
        spec: a Spec, plain data, or the path of a JSON file.
        backend, store: override the spec's `run.backend` and `run.store`; neither changes the run's name.
        allow_backend_change: go on from a state that another backend computed.
        progress: None shows a bar with the newest losses, False shows nothing; a function is called with the step and
            the metrics that are due there, which may be none. What it raises stops training as Ctrl-C does, with the
            state saved, and is raised then.

    Raises: SpecError, BackendUnavailableError, StoreError (RunOwnedError when the run is being trained already),
        CheckpointError, NonFiniteLossError; KeyboardInterrupt after SIGINT, when the state is saved; what `progress`
        raises.
    """
    if not (progress is None or progress is True or progress is False or callable(progress)):
        raise ValueError(f"train: got progress={progress!r}; expected None, True, False or a function of step and row.")
    resolved = with_run(load_spec(spec), backend=backend, store=store)
    if progress is None or progress is True:
        showing: AbstractContextManager[Progress] = progress_bar(resolved.training.total_steps, leave=True)
    else:
        showing = nullcontext(progress or (lambda step, row: None))
    with showing as show, interruptible() as interrupted:
        tell = Deferred(show, interrupted)
        outcome = execute(
            resolved,
            allow_backend_change=allow_backend_change,
            should_stop=lambda: interrupted() or tell.error is not None,
            progress=tell,
        )
        tell(outcome.step, {})
    if tell.error is not None:
        raise tell.error
    if interrupted():
        stopped = outcome.status == "interrupted"
        end = "what was trained is saved: run it again to go on" if stopped else "the run is complete"
        raise KeyboardInterrupt(f"interrupted, and {end}")
    return load_run(outcome.store, outcome.run)


def load_run(store: str | PathLike[str], name: str) -> Run:
    """The run of that name in a store (a local path or any fsspec URL).

    Args:
        name: the run's name, or enough of its beginning, or of the hash at its end, to tell it from all others.

    Raises: StoreError when the store or the run is not there, or more than one run is meant; CheckpointError when what
        is there is not the run.
    """
    opened = open_store(fspath(store), create=False)
    directory, spec = read_run(opened, find_run(opened, name))
    return Run(spec, directory)


def list_runs(store: str | PathLike[str]) -> list[RunSummary]:
    """Name, status and newest step of every run in a store, M4 before M16 and Minf last."""
    return _list_runs(open_store(fspath(store), create=False))


def _as_step(where: str, step: int) -> int:
    """A step as Python's integer, also when it is NumPy's."""
    try:
        return index(step)
    except TypeError:
        raise ValueError(f"{where}: got step {step!r}; expected an integer, the number of updates.") from None
