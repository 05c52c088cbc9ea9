"""Small models of every architecture, with parameters and inputs, for tests of the trained transformer as a module."""

from typing import Any

import torch
from torch import Tensor, nn

from icl.core.architectures.linear_attention import LinearAttention
from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.model import parameter_shapes
from icl.core.spec import Spec
from icl.testing import tiny_spec

MODELS = {
    "timaeus": Timaeus(num_heads=2, embed_dim=8),
    "timaeus-bare": Timaeus(num_heads=2, embed_dim=8, num_layers=1, layer_norm=False, attention_output=False),
    "raventos": Raventos(num_heads=2, embed_dim=8, num_layers=3),
    "linear_attention": LinearAttention(num_heads=2, embed_dim=8, num_layers=3),
}
SPECS = {name: tiny_spec(model=model) for name, model in MODELS.items()}


def sequences(spec: Spec, batch: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, spec.task.num_examples, spec.task.task_dim)
    return torch.randn(shape, generator=generator), torch.randn((*shape[:2], 1), generator=generator)


def fields(spec: Spec) -> Any:
    """The section of the architecture, with its own fields."""
    return spec.model


def has_mlp(spec: Spec) -> bool:
    return any(".mlp." in name for name in parameter_shapes(spec))


def random_params(spec: Spec) -> dict[str, Tensor]:
    """Every parameter in play: at the initialisation biases are 0 and layer norms the identity."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(spec).items()}


def recorded(model: nn.Module) -> list[tuple[str, Any]]:
    """What every module computes from now on, in order."""
    seen: list[tuple[str, Any]] = []
    for name, part in model.named_modules():
        part.register_forward_hook(lambda _, inputs, output, name=name: seen.append((name, output)))
    return seen
