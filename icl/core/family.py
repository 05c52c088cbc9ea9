"""The TaskFamily protocol: which functions are learned in context, and how their examples are drawn."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # so that a spec is read without PyTorch
    import numpy as np
    import numpy.typing as npt
    from torch import Generator, Tensor

    from icl.core.backend import Tree

    Floats = npt.NDArray[np.float32]


class TaskFamily(Protocol):
    """A section of the spec, `task`, that says how tasks and examples are drawn. `icl.core.families` lists them.

    A task is a vector w of `task_size` numbers. `icl.core.tasks` makes pools, batches and evaluation sets of these
    draws: first the inputs, then the tasks, from one generator.

    Laws:
        1. Draws depend on the generator and on the section alone, in a fixed order; the same bits on every machine.
        2. Drawing n tasks and then m gives the same as drawing n + m, so that pools are nested.
        3. A baseline's prediction k reads the first k examples and x_k only.
        4. The section imports no PyTorch when it is imported: the file is read to name a run.
    """

    @property
    def family(self) -> str:
        """The name in the spec and in the table."""
        ...

    @property
    def task_dim(self) -> int:
        """D, the width of an x; a y is one number."""
        ...

    @property
    def num_examples(self) -> int:
        """K."""
        ...

    @property
    def num_tasks(self) -> int | None:
        """M, the tasks of the pool; None draws every task afresh."""
        ...

    @property
    def noise_variance(self) -> float:
        """sigma^2 of the labels."""
        ...

    @property
    def task_size(self) -> int:
        """Numbers in one task."""
        ...

    @property
    def baselines(self) -> tuple[str, ...]:
        """The names of the predictors that a model is compared with, in the order of the metrics."""
        ...

    @property
    def equal_baselines(self) -> Mapping[str, str]:
        """Baselines that are not computed since they equal another one, and which: metrics are copied."""
        ...

    @property
    def baseline_bytes(self) -> int:
        """Bytes of memory that computing the baselines takes at least, beside its inputs and outputs."""
        ...

    def draw_inputs(self, rng: "np.random.Generator", batch_size: int) -> "tuple[Floats, Floats]":
        """xs (B, K, D), and what is random in the targets beside the task, as `targets` takes it."""
        ...

    def draw_tasks(self, rng: "np.random.Generator", count: int) -> "Floats":
        """(count, task_size) tasks of the prior."""
        ...

    def targets(self, xs: "Floats", noise: "Floats", ws: "Floats") -> "Floats":
        """(B, K): the ys of the tasks ws (B, task_size)."""
        ...

    def draw_on_device(self, batch_size: int, pool: "Tensor", generator: "Generator | None") -> "Tree":
        """xs (B, K, D) and ys (B, K, 1) by the device's own generator, on the device of `pool`.

        Args:
            pool: (M, task_size); not looked at when `num_tasks` is None.
        """
        ...

    def predictions(self, xs: "Tensor", ys: "Tensor", pool: "Tensor | None") -> "Mapping[str, Tensor]":
        """What each of `baselines` predicts, by name: (B, K, 1) float64."""
        ...
