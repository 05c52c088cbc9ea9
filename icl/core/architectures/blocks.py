"""The named parts that transformers are built from: what each makes of its inputs, and how a prediction joins them.

A part that holds others calls them by name through `call`, so that who gives `call` sees, and may replace, what passes.
Activations are (tokens, batch, features), so that dropping tokens and splitting heads copies nothing.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from icl.core.architecture import Call, Part
from icl.core.architectures.layout import Transformer
from icl.core.sequences import require_shape

_REGISTER = 16  # float32 numbers in the widest vector register of a processor


def predict(model: Transformer, call: Call, xs: Tensor, ys: Tensor) -> Tensor:
    """The prediction (B, K, 1) of every y, with every part of the model called by its name.

    The sequence is x_1, y_1, x_2, y_2, ...; here all x tokens come first and then all y tokens but the last, which can
    influence nothing; in the last layer only x tokens are carried on. Both are exact: attention does not see the order
    of its keys.
    """
    carried = call_blocks(call, model.num_layers, xs, ys[:, :-1], num_queries=xs.shape[1])
    if model.layer_norm:
        carried = call("final_layer_norm", carried)
    predictions: Tensor = call("unembedding", carried).transpose(0, 1)
    return predictions


def call_blocks(call: Call, num_layers: int, xs: Tensor, ys: Tensor, *, num_queries: int) -> Tensor:
    """The residual stream after the last block, (Q, B, E), in the order of its tokens: all x, then the y.

    Args:
        xs: (B, K, D). ys: (B, J, 1), the first J <= K targets.
        num_queries: Q, how many of the tokens the last block carries on.

    Raises: ValueError when what `call` gives for a block is not a residual stream of its tokens.
    """
    mask = causal_mask(xs.shape[1], ys.shape[1], xs)
    carried = _embed(call, xs, ys)
    width = carried.shape[-1]
    for layer in range(num_layers):
        name, seen = f"blocks.{layer}", mask[:num_queries] if layer == num_layers - 1 else mask
        carried = call(name, carried, seen)
        require_shape(name, carried, (seen.shape[0], xs.shape[0], width))
    return carried


def _embed(call: Call, xs: Tensor, ys: Tensor) -> Tensor:
    """The residual stream before the first block, (K + J, B, E)."""
    tokens = torch.cat([F.pad(xs, (1, 0)), F.pad(ys, (0, xs.shape[-1]))], dim=1).transpose(0, 1)
    embedded: Tensor = call("token_embedding", tokens) + call("position_embedding", xs.shape[1], ys.shape[1])
    return embedded


def causal_mask(num_xs: int, num_ys: int, like: Tensor) -> Tensor:
    """(T, T) additive mask for the order x_1..x_K, y_1..y_J: -inf where a key is in the future, else 0."""
    x_positions = torch.arange(0, 2 * num_xs, 2, device=like.device)
    positions = torch.cat([x_positions, x_positions[:num_ys] + 1])
    future = positions[None, :] > positions[:, None]
    return torch.zeros(future.shape, dtype=like.dtype, device=like.device).masked_fill(future, -math.inf)


def _position_embedding(part: Part, num_xs: int, num_ys: int) -> Tensor:
    positions = part.weight[: 2 * num_xs].view(num_xs, 2, part.model.embed_dim)
    return torch.cat([positions[:, 0], positions[:num_ys, 1]])[:, None]


def _linear(part: Part, inputs: Tensor) -> Tensor:
    return F.linear(inputs, part.weight, part.bias)


def _layer_norm(part: Part, inputs: Tensor) -> Tensor:
    return F.layer_norm(inputs, (part.model.embed_dim,), part.weight, part.bias, eps=1e-5)


def attend(part: Part, inputs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A block's input and that with its attention added, (Q, B, E) each from (T, B, E).

    The first Q tokens are carried on, those that `mask` (Q, T) has rows for.
    """
    normed = _normed(part, "attention_layer_norm", inputs)  # before `skip`: gradients are added in this order on XLA
    skip = inputs[: mask.shape[0]]
    carried: Tensor = skip + part.call(f"{part.name}.attention", normed, mask)
    return skip, carried


def add_mlp(part: Part, carried: Tensor) -> Tensor:
    """The residual stream with the MLP of a block added."""
    added: Tensor = carried + part.call(f"{part.name}.mlp", _normed(part, "mlp_layer_norm", carried))
    return added


def _normed(part: Part, name: str, inputs: Tensor) -> Tensor:
    normed: Tensor = part.call(f"{part.name}.{name}", inputs) if part.model.layer_norm else inputs
    return normed


def _attention(part: Part, inputs: Tensor, mask: Tensor) -> Tensor:
    """(Q, B, E) from (T, B, E)."""
    queries, keys, values = part.call(f"{part.name}.qkv", inputs, mask.shape[0])
    pattern = part.call(f"{part.name}.pattern", queries, keys, mask)
    mixed = torch.bmm(pattern, values).transpose(0, 1).reshape(mask.shape[0], inputs.shape[1], part.model.embed_dim)
    output: Tensor = part.call(f"{part.name}.output", mixed) if part.model.attention_output else mixed
    return output


def _qkv(part: Part, inputs: Tensor, num_queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B H, Q, E / H) of the first Q tokens, keys and values (B H, T, E / H) of all, from (T, B, E)."""
    batch, width, heads = inputs.shape[1], part.model.embed_dim, part.model.num_heads

    def split_heads(outputs: Tensor) -> Tensor:
        return outputs.reshape(outputs.shape[0], batch * heads, width // heads).transpose(0, 1)

    weights = part.weight.view(3, width, width).unbind()
    biases = (None, None, None) if part.bias is None else part.bias.view(3, width).unbind()
    queries = split_heads(F.linear(inputs[:num_queries], weights[0], biases[0]))
    keys, values = (split_heads(F.linear(inputs, weights[i], biases[i])) for i in (1, 2))
    return queries, keys, values


def _pattern(part: Part, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """How much each query attends to each key, (B H, Q, T); every row sums to 1."""
    scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=queries.shape[-1] ** -0.5)
    return _softmax(scores)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis, with keys that count for nothing where there are fewer than a vector register holds.

    For (1024, 15, 15), K = 8, PyTorch's CPU kernel takes 4.2 ms without them and 0.4 with, 1.7 and 0.1 back (AVX512).
    """
    num_keys = scores.shape[-1]
    if num_keys >= _REGISTER:
        return scores.softmax(-1)
    return F.pad(scores, (0, _REGISTER - num_keys), value=-math.inf).softmax(-1)[..., :num_keys]


def relu_mlp(part: Part, inputs: Tensor) -> Tensor:
    """An MLP with a ReLU between its two layers."""
    output: Tensor = part.call(f"{part.name}.output", part.call(f"{part.name}.hidden", inputs).relu())
    return output


def gelu_mlp(part: Part, inputs: Tensor) -> Tensor:
    """An MLP with the tanh approximation of a GELU between its two layers."""
    hidden: Tensor = part.call(f"{part.name}.hidden", inputs)
    output: Tensor = part.call(f"{part.name}.output", F.gelu(hidden, approximate="tanh"))
    return output


def _unembedding(part: Part, inputs: Tensor) -> Tensor:
    """Column 0 of the read-out, (Q, B, 1): the prediction of y. The published models have D more, which say nothing."""
    return F.linear(inputs, part.weight[:1], None if part.bias is None else part.bias[:1])


PARTS: Mapping[str, Callable[..., Any]] = {
    "token_embedding": _linear,
    "position_embedding": _position_embedding,
    "attention_layer_norm": _layer_norm,
    "mlp_layer_norm": _layer_norm,
    "attention": _attention,
    "qkv": _qkv,
    "pattern": _pattern,
    "output": _linear,
    "hidden": _linear,
    "final_layer_norm": _layer_norm,
    "unembedding": _unembedding,
}
"""By the last word of a part's name. An architecture adds "block", and "mlp" where it has one."""
