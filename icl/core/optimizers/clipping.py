"""Gradients of bounded size."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from icl.core.optimizer import Number


def clip_by_global_norm(grads: "Tensor", max_norm: "Number") -> "Tensor":
    """`grads` scaled so that their 2-norm is at most `max_norm`; the same object's values when it already is.

    Source: `torch.nn.utils.clip_grad_norm_` (with its 1e-6 in the denominator).
    """
    norm = grads.square().sum(-1, keepdim=True).sqrt()
    return grads * (max_norm / (norm + 1e-6)).clamp(max=1.0)
