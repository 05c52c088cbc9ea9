"""The model of a spec as pure functions of a flat tree of parameters, whatever its architecture."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from icl.core.architecture import Architecture, Part, Shapes
from icl.core.backend import Tree
from icl.core.seeds import derive_generator
from icl.core.spec import Experiment


def parameter_shapes(experiment: Experiment) -> Shapes:
    """Name and shape of every parameter, in the order of the flat vector."""
    return experiment.model.shapes(experiment.task.task_dim, experiment.task.num_examples)


def init_params(experiment: Experiment) -> Tree:
    """The parameters at step 0: each tensor a function of (`seeds.init`, its name) only.

    Returns: float32 CPU tensors with the names and shapes of `parameter_shapes`.
    """
    shapes = parameter_shapes(experiment)

    def initial(name: str) -> Tensor:
        return torch.from_numpy(
            experiment.model.init(name, shapes, derive_generator(experiment.seeds.init, "init", name))
        )

    return {name: initial(name) for name in shapes}


def flatten_params(experiment: Experiment, params: Mapping[str, Tensor]) -> Tensor:
    """All parameters as one vector (P,), in the order of `parameter_shapes`."""
    return torch.cat([params[name].reshape(-1) for name in parameter_shapes(experiment)])


def unflatten_params(experiment: Experiment, vector: Tensor) -> Tree:
    """The inverse of `flatten_params`: views into `vector` (P,)."""
    shapes = parameter_shapes(experiment)
    parts = torch.split(vector, [math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def computation(model: Architecture, name: str) -> Callable[..., Any]:
    """`computation(model, name)(part, *inputs)`: what the part of that name makes of its inputs."""
    return model.parts()[_kind(name)]


def _kind(name: str) -> str:
    last = name.rpartition(".")[2]
    return "block" if last.isdecimal() else last


def predict(model: Architecture, params: Mapping[str, Tensor], xs: Tensor, ys: Tensor) -> Tensor:
    """The model's prediction of every y from the examples before it; prediction k has seen k examples.

    Laws: prediction k is bit-for-bit independent of ys[k:] and xs[k+1:]; permuting the batch permutes the output.

    Args:
        params: as `init_params`, on any device.
        xs: (B, K, D) float32, K at most the spec's `num_examples`.
        ys: (B, K, 1) float32; the last one is not read.

    Returns: (B, K, 1) float32.
    """
    parts = model.parts()

    def call(name: str, *inputs: Any) -> Any:
        return parts[_kind(name)](Part(model, params, name, call), *inputs)

    return model.predict(call, xs, ys)
