"""Two published transformers as pure functions of a flat tree of parameters."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from icl.core.backend import Tree
from icl.core.parts import Call, Part, causal_mask, computation, embed
from icl.core.seeds import derive_generator
from icl.core.spec import ModelSpec, Spec

Floats = npt.NDArray[np.float32]


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

    Args:
        params: as `init_params`, on any device.
        xs: (B, K, D) float32, K at most the spec's `num_examples`.
        ys: (B, K, 1) float32; the last one is not read.

    Returns: (B, K, 1) float32.
    Source: Hoogland et al. 2024 ("timaeus"), Raventos et al. 2023 ("raventos").
    """

    def call(name: str, *inputs: Any) -> Any:
        return computation(name)(Part(model, params, name, call), *inputs)

    return predict_through(call, model, xs, ys)


def predict_through(call: Call, model: ModelSpec, xs: Tensor, ys: Tensor) -> Tensor:
    """`predict`, with every part of the model called by its name.

    The sequence is x_1, y_1, x_2, y_2, ...; here all x tokens come first and then all y tokens but the last, which can
    influence nothing; in the last layer only x tokens are carried on. Both are exact: attention does not see the order
    of its keys.
    """
    examples = xs.shape[1]
    mask = causal_mask(examples, examples - 1, xs)
    carried = embed(call, xs, ys[:, :-1])
    for layer in range(model.num_layers):
        carried = call(f"blocks.{layer}", carried, mask[:examples] if layer == model.num_layers - 1 else mask)
    if model.layer_norm:
        carried = call("final_layer_norm", carried)
    predictions: Tensor = call("unembedding", carried).transpose(0, 1)
    return predictions


def attention_patterns(model: ModelSpec, params: Mapping[str, Tensor], xs: Tensor, ys: Tensor) -> list[Tensor]:
    """How much every token attends to every other, for each layer, in the order x_1, y_1, x_2, y_2, ..., x_K, y_K.

    All 2K tokens are computed in every layer, also the rows that `predict` leaves out because nothing reads them: those
    of y tokens in the last layer and of y_K in all. Rows sum to 1 and are 0 for later tokens.

    Args:
        as `predict`; here the last of ys is read.

    Returns: for each layer (B, H, 2K, 2K) float32, queries before keys.
    """
    batch, examples, _ = xs.shape
    patterns: list[Tensor] = []

    def call(name: str, *inputs: Any) -> Any:
        result = computation(name)(Part(model, params, name, call), *inputs)
        if name.endswith(".pattern"):
            patterns.append(result)
        return result

    mask = causal_mask(examples, examples, xs)
    carried = embed(call, xs, ys)
    for layer in range(model.num_layers):
        carried = call(f"blocks.{layer}", carried, mask)
    places = torch.arange(2 * examples, device=xs.device).view(2, examples).T.reshape(-1)  # of x_1, y_1, x_2, ...
    shape = (batch, model.num_heads, 2 * examples, 2 * examples)
    return [pattern.reshape(shape)[:, :, places][..., places] for pattern in patterns]
