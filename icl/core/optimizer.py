"""The Optimizer protocol: how parameters follow their gradients."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # so that a spec is read without PyTorch
    from torch import Tensor

    from icl.core.backend import Tree

Number: TypeAlias = "float | Tensor"
"""A hyperparameter: a constant of the program, or data of it, (...) float32 with one value a member."""


class Optimizer(Protocol):
    """A section of the spec, `training.optimizer`, that updates parameters. `icl.core.optimizers` lists them.

    Laws:
        1. `update` is pure, follows the device of its inputs and reads no value on the host.
        2. With a leading axis of members on every leaf each member is updated as if alone.
        3. The leaves of `init` and of the state that `update` returns are `leaves`, in that order, float32 and of the
           shape of the parameters. Files hold them under these names.
        4. A hyperparameter given as a tensor does what the same number does in the section, up to its rounding.
        5. The section imports no PyTorch when it is imported: the file is read to name a run.
    """

    @property
    def name(self) -> str:
        """The name in the spec and in the table."""
        ...

    @property
    def leaves(self) -> tuple[str, ...]:
        """The names of its own state's leaves; not "params" and "step", which are the trainer's."""
        ...

    def init(self, params: "Tensor") -> "Tree":
        """Its own state at step 0."""
        ...

    @property
    def hyperparameters(self) -> "Mapping[str, float]":
        """The section's numbers, without those that are off."""
        ...

    def update(
        self,
        params: "Tensor",
        grads: "Tensor",
        state: "Tree",
        step: "Tensor",
        lr: "Tensor",
        hyperparameters: "Mapping[str, Number] | None" = None,
    ) -> "tuple[Tensor, Tree]":
        """New parameters and its own new state.

        Args:
            params, grads: (..., P) float32.
            state: has its own leaves; others are not looked at.
            step: (...) int64, updates done so far.
            lr: (...) float32.
            hyperparameters: instead of its own, under the same names.
        """
        ...


def by_member(value: "Number") -> "Number":
    """A hyperparameter as it multiplies (..., P): a tensor with one more axis."""
    return value if isinstance(value, float) else value[..., None]
