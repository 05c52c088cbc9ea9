"""The transformer of Raventos et al. 2023, as their code computes it."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import attrs

from icl.core.architecture import Call, Part, Shapes
from icl.core.architectures.layout import check_heads, init_layer_norm, transformer_activations, transformer_shapes
from icl.core.errors import SpecError
from icl.core.rules import BOOLEAN, COUNT, LAYERS, choice, with_plain_values

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from icl.core.architecture import Floats


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class Raventos:
    """The GPT-2 of Raventos et al. 2023.

    Pre-LayerNorm, tanh-GELU, a scalar read-out. Weights begin as N(0, 0.02), residual projections as
    N(0, 0.02 / sqrt(2 L)), biases as 0.

    Source: mansheej/icl-task-diversity (gpt2.py).
    """

    architecture: Literal["raventos"] = attrs.field(
        default="raventos", validator=choice("raventos"), metadata={"help": "The architecture."}
    )
    num_layers: int = attrs.field(default=2, validator=LAYERS, metadata={"help": "L: layers."})
    num_heads: int = attrs.field(
        default=4, validator=COUNT, metadata={"help": "H: attention heads in a layer; a divisor of embed_dim."}
    )
    embed_dim: int = attrs.field(default=64, validator=COUNT, metadata={"help": "E: width of the embedding."})
    mlp_dim: int = attrs.field(
        validator=COUNT, metadata={"help": "Width of the hidden layer of each MLP.", "default": "4 embed_dim"}
    )
    layer_norm: bool = attrs.field(
        default=True,
        validator=BOOLEAN,
        metadata={"help": "Always true: a LayerNorm stands before attention, before each MLP and before the read-out."},
    )
    attention_output: bool = attrs.field(
        default=True, validator=BOOLEAN, metadata={"help": "Always true: attention ends in an output projection."}
    )

    @mlp_dim.default
    def _mlp_dim(self) -> int:
        return 4 * self.embed_dim

    def __attrs_post_init__(self) -> None:
        faults = check_heads(self)
        faults += [
            f'{name}: got false; expected true, which architecture "raventos" always has.'
            for name in ("layer_norm", "attention_output")
            if not getattr(self, name)
        ]
        if faults:
            raise SpecError(*faults)

    def shapes(self, task_dim: int, num_examples: int) -> Shapes:
        return transformer_shapes(
            self,
            task_dim,
            num_examples,
            mlp_dim=self.mlp_dim,
            attention_bias=True,
            num_outputs=1,
            output_bias=False,
        )

    def init(self, name: str, shapes: Shapes, rng: "np.random.Generator") -> "Floats":
        if "layer_norm" in name:
            return init_layer_norm(name, shapes)
        residual = name.endswith((".attention.output.weight", ".mlp.output.weight"))
        std = 0.02 / math.sqrt(2 * self.num_layers) if residual else 0.02
        return rng.standard_normal(shapes[name], "float32") * (std if name.endswith(".weight") else 0.0)

    def parts(self) -> Mapping[str, Callable[..., Any]]:
        from icl.core.architectures import blocks

        def block(part: Part, inputs: "Tensor", mask: "Tensor") -> "Tensor":
            return blocks.add_mlp(part, blocks.attend(part, inputs, mask)[1])

        return {**blocks.PARTS, "block": block, "mlp": blocks.gelu_mlp}

    def predict(self, call: Call, xs: "Tensor", ys: "Tensor") -> "Tensor":
        from icl.core.architectures import blocks

        return blocks.predict(self, call, xs, ys)

    def activations(self, num_examples: int, *, backward: bool) -> int:
        return transformer_activations(self, num_examples, mlp_dim=self.mlp_dim, kept_of_mlp=2, backward=backward)
