"""Two published transformers as pure functions of a flat tree of parameters."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from icl.core.backend import Tree
from icl.core.seeds import derive_generator
from icl.core.spec import ModelSpec, Spec

Floats = npt.NDArray[np.float32]
_REGISTER = 16  # float32 numbers in the widest vector register of a processor


def parameter_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, in the order of the flat vector.

    Weights are (out, in). `attention.qkv` stacks queries, keys and values, each with the heads in order:
    (3, num_heads, head_dim) over (embed_dim). Token layout: column 0 reads y, columns 1..D read x.
    """
    model, dim, embed, hidden = spec.model, spec.task.task_dim, spec.model.embed_dim, spec.model.mlp_dim
    gpt2 = model.architecture == "raventos"
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (embed, dim + 1),
        "position_embedding.weight": (2 * spec.task.num_examples, embed),
    }

    def add(name: str, *shape: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]

    for layer in range(model.num_layers):
        block = f"blocks.{layer}"
        if model.layer_norm:
            add(f"{block}.attention_layer_norm", embed)
            add(f"{block}.mlp_layer_norm", embed)
        add(f"{block}.attention.qkv", 3 * embed, embed, bias=gpt2)
        if model.attention_output:
            add(f"{block}.attention.output", embed, embed, bias=gpt2)
        add(f"{block}.mlp.hidden", hidden, embed)
        add(f"{block}.mlp.output", embed, hidden)
    if model.layer_norm:
        add("final_layer_norm", embed)
    add("unembedding", 1 if gpt2 else dim + 1, embed, bias=not gpt2)
    return shapes


def init_params(spec: Spec) -> Tree:
    """The parameters at step 0: each tensor a function of (`seeds.init`, its name) only.

    timaeus: U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for weights and biases (`torch.nn.Linear`'s default).
    raventos: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2 L)), biases 0.
    Layer norms: weight 1, bias 0.

    Returns: float32 CPU tensors with the names and shapes of `parameter_shapes`.
    Source: timaeus-research/icl; mansheej/icl-task-diversity (gpt2.py).
    """
    shapes = parameter_shapes(spec)
    return {name: torch.from_numpy(_init(spec, name, shape, shapes)) for name, shape in shapes.items()}


def _init(spec: Spec, name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> Floats:
    is_weight = name.endswith(".weight")
    if "layer_norm" in name:
        return np.full(shape, 1.0 if is_weight else 0.0, np.float32)
    rng = derive_generator(spec.seeds.init, "init", name)
    drawn: Floats
    if spec.model.architecture == "raventos":
        residual = name.endswith((".attention.output.weight", ".mlp.output.weight"))
        std = 0.02 / math.sqrt(2 * spec.model.num_layers) if residual else 0.02
        drawn = rng.standard_normal(shape, np.float32) * np.float32(std if is_weight else 0.0)
        return drawn
    weight = shapes[name if is_weight else name[: -len("bias")] + "weight"]
    # The published position embedding is a Linear(2K -> E): its fan-in is the number of positions.
    fan_in = weight[0] if name == "position_embedding.weight" else weight[-1]
    drawn = (2 * rng.random(shape, np.float32) - 1) * np.float32(1 / math.sqrt(fan_in))
    return drawn


def flatten_params(spec: Spec, params: Mapping[str, Tensor]) -> Tensor:
    """All parameters as one vector (P,), in the order of `parameter_shapes`."""
    return torch.cat([params[name].reshape(-1) for name in parameter_shapes(spec)])


def unflatten_params(spec: Spec, vector: Tensor) -> Tree:
    """The inverse of `flatten_params`: views into `vector` (P,)."""
    shapes = parameter_shapes(spec)
    parts = torch.split(vector, [math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def predict(model: ModelSpec, params: Mapping[str, Tensor], xs: Tensor, ys: Tensor) -> Tensor:
    """The model's prediction of every y from the examples before it; prediction k has seen k examples.

    Laws: prediction k is bit-for-bit independent of ys[k:] and xs[k+1:]; permuting the batch permutes the output.
    The sequence is x_1, y_1, x_2, y_2, ...; here all x tokens come first and then all y tokens but the last, which can
    influence nothing; in the last layer only x tokens are carried on. Both are exact: attention does not see the order
    of its keys. Activations are (tokens, batch, features), so that dropping tokens and splitting heads copies nothing.

    Args:
        params: as `init_params`, on any device.
        xs: (B, K, D) float32, K at most the spec's `num_examples`.
        ys: (B, K, 1) float32; the last one is not read.

    Returns: (B, K, 1) float32.
    Source: Hoogland et al. 2024 ("timaeus"), Raventos et al. 2023 ("raventos").
    """
    batch, examples, _ = xs.shape
    embed, heads = model.embed_dim, model.num_heads
    gpt2 = model.architecture == "raventos"

    def linear(name: str, inputs: Tensor) -> Tensor:
        return F.linear(inputs, params[f"{name}.weight"], params.get(f"{name}.bias"))

    def layer_norm(name: str, inputs: Tensor) -> Tensor:
        if not model.layer_norm:
            return inputs
        return F.layer_norm(inputs, (embed,), params[f"{name}.weight"], params[f"{name}.bias"], eps=1e-5)

    def split_heads(inputs: Tensor) -> Tensor:
        return inputs.reshape(inputs.shape[0], batch * heads, embed // heads).transpose(0, 1)

    def attention(name: str, inputs: Tensor, num_queries: int) -> Tensor:
        weights = params[f"{name}.qkv.weight"].view(3, embed, embed).unbind()
        biases = params[f"{name}.qkv.bias"].view(3, embed).unbind() if gpt2 else (None, None, None)
        queries = split_heads(F.linear(inputs[:num_queries], weights[0], biases[0]))
        keys, values = (split_heads(F.linear(inputs, weights[i], biases[i])) for i in (1, 2))
        scores = torch.baddbmm(mask[:num_queries], queries, keys.transpose(1, 2), alpha=(embed // heads) ** -0.5)
        mixed = torch.bmm(_softmax(scores), values).transpose(0, 1).reshape(num_queries, batch, embed)
        return linear(f"{name}.output", mixed) if model.attention_output else mixed

    def mlp(name: str, inputs: Tensor) -> Tensor:
        hidden = linear(f"{name}.hidden", inputs)
        return linear(f"{name}.output", F.gelu(hidden, approximate="tanh") if gpt2 else hidden.relu())

    mask = _causal_mask(examples, xs)
    tokens = torch.cat([F.pad(xs, (1, 0)), F.pad(ys[:, :-1], (0, xs.shape[-1]))], dim=1).transpose(0, 1)
    positions = params["position_embedding.weight"][: 2 * examples].view(examples, 2, embed)
    carried = linear("token_embedding", tokens)
    carried = carried + torch.cat([positions[:, 0], positions[:-1, 1]])[:, None]
    for layer in range(model.num_layers):
        block = f"blocks.{layer}"
        num_queries = examples if layer == model.num_layers - 1 else 2 * examples - 1
        normed = layer_norm(f"{block}.attention_layer_norm", carried)
        skip = carried[:num_queries]
        carried = skip + attention(f"{block}.attention", normed, num_queries)
        carried = carried + mlp(f"{block}.mlp", layer_norm(f"{block}.mlp_layer_norm", carried))
        if not gpt2:
            carried = skip + carried  # the published code adds a block's input once inside it and once outside
    carried = layer_norm("final_layer_norm", carried)
    bias = None if gpt2 else params["unembedding.bias"][:1]
    return F.linear(carried, params["unembedding.weight"][:1], bias).transpose(0, 1)


def _softmax(scores: Tensor) -> Tensor:
    """Softmax over the last axis, with keys that count for nothing where there are fewer than a vector register holds.

    For (1024, 15, 15), K = 8, PyTorch's CPU kernel takes 4.2 ms without them and 0.4 with, 1.7 and 0.1 back (AVX512).
    """
    num_keys = scores.shape[-1]
    if num_keys >= _REGISTER:
        return scores.softmax(-1)
    return F.pad(scores, (0, _REGISTER - num_keys), value=-math.inf).softmax(-1)[..., :num_keys]


def _causal_mask(examples: int, like: Tensor) -> Tensor:
    """(2K-1, 2K-1) additive mask for the order x_1..x_K, y_1..y_(K-1): -inf where a key is in the future, else 0."""
    x_positions = torch.arange(0, 2 * examples, 2, device=like.device)
    positions = torch.cat([x_positions, x_positions[:-1] + 1])
    future = positions[None, :] > positions[:, None]
    return torch.zeros(future.shape, dtype=like.dtype, device=like.device).masked_fill(future, -math.inf)
