"""What the transformers built from `blocks` have in common, told without PyTorch: names, shapes and sizes."""

import math
from typing import TYPE_CHECKING, Protocol

from icl.core.architecture import Shapes

if TYPE_CHECKING:
    import numpy as np

    from icl.core.architecture import Floats


class Transformer(Protocol):
    """The fields of a section whose parts are those of `blocks`."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def embed_dim(self) -> int: ...
    @property
    def layer_norm(self) -> bool: ...
    @property
    def attention_output(self) -> bool: ...


def check_heads(model: Transformer) -> list[str]:
    """What is wrong with the number of heads, as faults of a spec."""
    if not model.embed_dim % model.num_heads:
        return []
    return [f"num_heads: got {model.num_heads}; expected a divisor of embed_dim={model.embed_dim}."]


def transformer_shapes(
    model: Transformer,
    task_dim: int,
    num_examples: int,
    *,
    mlp_dim: int,
    attention_bias: bool,
    num_outputs: int,
    output_bias: bool,
) -> Shapes:
    """Names and shapes of a decoder-only transformer's parameters, in the order of the flat vector.

    Weights are (out, in). `attention.qkv` stacks queries, keys and values, each with the heads in order:
    (3, num_heads, head_dim) over (embed_dim). Token layout: column 0 reads y, columns 1..D read x.

    Args:
        mlp_dim: 0 for blocks without MLP.
        num_outputs: rows of the read-out, of which the first predicts y.
    """
    embed = model.embed_dim
    shapes: Shapes = {
        "token_embedding.weight": (embed, task_dim + 1),
        "position_embedding.weight": (2 * num_examples, embed),
    }

    def add(name: str, *shape: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]

    for layer in range(model.num_layers):
        block = f"blocks.{layer}"
        if model.layer_norm:
            add(f"{block}.attention_layer_norm", embed)
            if mlp_dim:
                add(f"{block}.mlp_layer_norm", embed)
        add(f"{block}.attention.qkv", 3 * embed, embed, bias=attention_bias)
        if model.attention_output:
            add(f"{block}.attention.output", embed, embed, bias=attention_bias)
        if mlp_dim:
            add(f"{block}.mlp.hidden", mlp_dim, embed)
            add(f"{block}.mlp.output", embed, mlp_dim)
    if model.layer_norm:
        add("final_layer_norm", embed)
    add("unembedding", num_outputs, embed, bias=output_bias)
    return shapes


def init_layer_norm(name: str, shapes: Shapes) -> "Floats":
    """1 for the weight of a layer norm, 0 for its bias."""
    import numpy as np

    return np.full(shapes[name], 1.0 if name.endswith(".weight") else 0.0, np.float32)


def init_uniform(name: str, shapes: Shapes, rng: "np.random.Generator") -> "Floats":
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for weights and biases: `torch.nn.Linear`'s default."""
    weight = shapes[f"{name.rpartition('.')[0]}.weight"]
    # The published position embedding is a Linear(2K -> E): its fan-in is the number of positions.
    fan_in = weight[0] if name == "position_embedding.weight" else weight[-1]
    return (2 * rng.random(shapes[name], "float32") - 1) * (1 / math.sqrt(fan_in))


def transformer_activations(
    model: Transformer, num_examples: int, *, mlp_dim: int, kept_of_mlp: int, backward: bool
) -> int:
    """What `Architecture.activations` says: of each block what its products, softmax and norms differentiate.

    Without a backward pass it is the attention of one block.

    Args:
        kept_of_mlp: how many tensors of width `mlp_dim` the MLP keeps.
    """
    tokens, embed = 2 * num_examples - 1, model.embed_dim
    if not backward:
        return model.num_heads * (num_examples if model.num_layers == 1 else tokens) * tokens
    norms, mixed, inner = int(model.layer_norm), int(model.attention_output), int(mlp_dim > 0)

    def block(queries: int) -> int:
        by_token = (3 + norms) * embed  # keys, values, the block's input and that input normalised
        by_query = (1 + mixed + (1 + norms) * inner) * embed + kept_of_mlp * mlp_dim + model.num_heads * tokens
        return tokens * by_token + queries * by_query

    return (model.num_layers - 1) * block(tokens) + block(num_examples)
