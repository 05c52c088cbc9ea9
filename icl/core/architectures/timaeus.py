"""The transformer of Hoogland et al. 2024, as their code computes it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs

from icl.core.architecture import Call, Part, Shapes
from icl.core.architectures.layout import (
    check_heads,
    init_layer_norm,
    init_uniform,
    transformer_activations,
    transformer_shapes,
)
from icl.core.errors import SpecError
from icl.core.rules import BOOLEAN, COUNT, LAYERS, choice, with_plain_values

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from icl.core.architecture import Floats


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class Timaeus:
    """The decoder-only transformer of Hoogland et al. 2024.

    Pre-LayerNorm, ReLU, a read-out of D + 1 numbers, no bias in attention; a block's input is added to it twice.

    Source: timaeus-research/icl.
    """

    architecture: Literal["timaeus"] = attrs.field(
        default="timaeus", validator=choice("timaeus"), metadata={"help": "The architecture."}
    )
    num_layers: int = attrs.field(default=2, validator=LAYERS, metadata={"help": "L: layers."})
    num_heads: int = attrs.field(
        default=4, validator=COUNT, metadata={"help": "H: attention heads in a layer; a divisor of embed_dim."}
    )
    embed_dim: int = attrs.field(default=64, validator=COUNT, metadata={"help": "E: width of the embedding."})
    mlp_dim: int = attrs.field(
        validator=COUNT, metadata={"help": "Width of the hidden layer of each MLP.", "default": "embed_dim"}
    )
    layer_norm: bool = attrs.field(
        default=True,
        validator=BOOLEAN,
        metadata={"help": "Whether a LayerNorm stands before attention, before each MLP and before the read-out."},
    )
    attention_output: bool = attrs.field(
        default=True, validator=BOOLEAN, metadata={"help": "Whether attention ends in an output projection."}
    )

    @mlp_dim.default
    def _mlp_dim(self) -> int:
        return self.embed_dim

    def __attrs_post_init__(self) -> None:
        if faults := check_heads(self):
            raise SpecError(*faults)

    def shapes(self, task_dim: int, num_examples: int) -> Shapes:
        return transformer_shapes(
            self,
            task_dim,
            num_examples,
            mlp_dim=self.mlp_dim,
            attention_bias=False,
            num_outputs=task_dim + 1,
            output_bias=True,
        )

    def init(self, name: str, shapes: Shapes, rng: "np.random.Generator") -> "Floats":
        return init_layer_norm(name, shapes) if "layer_norm" in name else init_uniform(name, shapes, rng)

    def parts(self) -> Mapping[str, Callable[..., Any]]:
        from icl.core.architectures import blocks

        def block(part: Part, inputs: "Tensor", mask: "Tensor") -> "Tensor":
            skip, carried = blocks.attend(part, inputs, mask)
            return skip + blocks.add_mlp(part, carried)  # the published code adds the input once here and once outside

        return {**blocks.PARTS, "block": block, "mlp": blocks.relu_mlp}

    def predict(self, call: Call, xs: "Tensor", ys: "Tensor") -> "Tensor":
        from icl.core.architectures import blocks

        return blocks.predict(self, call, xs, ys)

    def activations(self, num_examples: int, *, backward: bool) -> int:
        return transformer_activations(self, num_examples, mlp_dim=self.mlp_dim, kept_of_mlp=1, backward=backward)
