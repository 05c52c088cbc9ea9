"""A transformer of linear attention alone: no softmax, no MLP."""

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
class LinearAttention:
    """Linear self-attention: L `num_layers`, H `num_heads`, E `embed_dim`; pre-LayerNorm as an option.

    A query attends to a key by their product / (sqrt(E / H) n), where n is the number of tokens up to the query: a mean
    over tokens, whose rows do not sum to 1. The output projection is always there, attention has no bias. Weights and
    biases begin as U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

    Source: von Oswald et al. 2023, without the 1 / n; Zhang et al. 2024 have it. Both mask nothing and
    put (x, y) in one token. Here x and y are tokens in turn, with learned positions, as in the other architectures, and
    layer norms are on by default: without them it did not learn in our trials.
    """

    architecture: Literal["linear_attention"] = attrs.field(
        default="linear_attention", validator=choice("linear_attention"), metadata={"help": "The architecture."}
    )
    num_layers: int = attrs.field(default=2, validator=LAYERS, metadata={"help": "L: layers."})
    num_heads: int = attrs.field(
        default=4, validator=COUNT, metadata={"help": "H: attention heads in a layer; a divisor of embed_dim."}
    )
    embed_dim: int = attrs.field(default=64, validator=COUNT, metadata={"help": "E: width of the embedding."})
    layer_norm: bool = attrs.field(
        default=True,
        validator=BOOLEAN,
        metadata={"help": "Whether a LayerNorm stands before attention and before the read-out."},
    )

    def __attrs_post_init__(self) -> None:
        if faults := check_heads(self):
            raise SpecError(*faults)

    @property
    def attention_output(self) -> bool:
        return True

    def shapes(self, task_dim: int, num_examples: int) -> Shapes:
        return transformer_shapes(
            self, task_dim, num_examples, mlp_dim=0, attention_bias=False, num_outputs=1, output_bias=True
        )

    def init(self, name: str, shapes: Shapes, rng: "np.random.Generator") -> "Floats":
        return init_layer_norm(name, shapes) if "layer_norm" in name else init_uniform(name, shapes, rng)

    def parts(self) -> Mapping[str, Callable[..., Any]]:
        from icl.core.architectures import blocks

        def block(part: Part, inputs: "Tensor", mask: "Tensor") -> "Tensor":
            return blocks.attend(part, inputs, mask)[1]

        def pattern(part: Part, queries: "Tensor", keys: "Tensor", mask: "Tensor") -> "Tensor":
            weights = mask.exp()  # 1 for a key that is seen, 0 for one in the future
            weights = weights / (weights.sum(-1, keepdim=True) * queries.shape[-1] ** 0.5)
            attended: Tensor = (queries @ keys.transpose(1, 2)) * weights
            return attended

        return {**blocks.PARTS, "block": block, "pattern": pattern}

    def predict(self, call: Call, xs: "Tensor", ys: "Tensor") -> "Tensor":
        from icl.core.architectures import blocks

        return blocks.predict(self, call, xs, ys)

    def activations(self, num_examples: int, *, backward: bool) -> int:
        return transformer_activations(self, num_examples, mlp_dim=0, kept_of_mlp=0, backward=backward)
