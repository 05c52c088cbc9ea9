"""The Architecture protocol: a model as pure functions of a flat tree of parameters, and the parts it is made of."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import attrs

if TYPE_CHECKING:  # so that a spec is read without PyTorch
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[np.float32]

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""The shape of every parameter by its name, in the order of the flat vector."""

Call: TypeAlias = Callable[..., Any]
"""`call(name, *inputs)`: what the part of that full name, such as "blocks.0.attention", makes of its inputs."""


@attrs.define(eq=False)  # not frozen, which takes three times as long to make and which torch.compile does not trace
class Part:
    """One part of a model: `params` holds its own parameters, by full name, and `call` reaches the parts inside it.

    One is made at every call, which is the host's time on a fast device.
    """

    model: Any
    params: "Mapping[str, Tensor]"
    name: str
    call: Call

    @property
    def weight(self) -> "Tensor":
        return self.params[f"{self.name}.weight"]

    @property
    def bias(self) -> "Tensor | None":
        return self.params.get(f"{self.name}.bias")


class Architecture(Protocol):
    """A section of the spec, `model`, that says what predicts. `icl.core.architectures` lists them.

    Laws:
        1. Prediction k is bit-for-bit independent of ys[k:] and xs[k+1:]; permuting the batch permutes the output.
        2. Everything that reads parameters is a part and is reached through `call`, so that who gives `call` sees, and
           may replace, what passes. The parameters of the part p are named `p.weight` and `p.bias`.
        3. The initial value of a parameter is a function of its own generator, its name and the shapes.
        4. Every layer has as many parameters as any other.
        5. `predict` follows the device of its inputs, reads no value on the host and can be mapped by `torch.vmap`.
        6. The section imports no PyTorch when it is imported: the file is read to name a run.
    """

    @property
    def architecture(self) -> str:
        """The name in the spec and in the table."""
        ...

    @property
    def num_layers(self) -> int:
        """L, which the run's name shows."""
        ...

    @property
    def num_heads(self) -> int:
        """H, which the run's name shows."""
        ...

    def shapes(self, task_dim: int, num_examples: int) -> Shapes:
        """The shapes of all parameters for x tokens of width D and sequences of K examples."""
        ...

    def init(self, name: str, shapes: Shapes, rng: "np.random.Generator") -> "Floats":
        """The initial value of one parameter, float32."""
        ...

    def parts(self) -> Mapping[str, Callable[..., Any]]:
        """`compute(part, *inputs)` by the last word of a part's name; "block" for one whose last word is a number."""
        ...

    def predict(self, call: Call, xs: "Tensor", ys: "Tensor") -> "Tensor":
        """The prediction (B, K, 1) of every y from the examples before it.

        Args:
            xs: (B, K, D). ys: (B, K, 1); the last one is not read.
        """
        ...

    def activations(self, num_examples: int, *, backward: bool) -> int:
        """Numbers held of one sequence, no more than really are: for a backward pass, or without one."""
        ...
