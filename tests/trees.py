"""What a trainer saves, of the shapes that a spec asks for and filled with one number."""

import torch

from icl.core.backend import Tree
from icl.core.model import parameter_shapes
from icl.core.spec import Spec
from icl.core.step import init_state

METADATA = {"backend": '{"name": "one"}'}


def params(spec: Spec, value: float) -> Tree:
    """A checkpoint whose every parameter is `value`."""
    return {name: torch.full(shape, float(value)) for name, shape in parameter_shapes(spec).items()}


def state(spec: Spec, step: int) -> Tree:
    """A state after `step` updates, whose every parameter is that number."""
    made = init_state(spec)
    return {**made, "params": torch.full_like(made["params"], step), "step": torch.tensor(step)}
