"""Whether tensors are sequences of examples, said in words where a user hands them in."""

import torch
from torch import Tensor


def require_sequences(where: str, xs: object, ys: object, *, dim: int | None = None, most: int | None = None) -> None:
    """Raise ValueError unless xs is (B, K, D) and ys is (B, K, 1), of one floating dtype and on one device.

    Args:
        where: the function that was called, for the message.
        dim, most: D and the largest K, where they are given.
    """
    sizes = f"(B, K, {'D' if dim is None else dim})"
    if not isinstance(xs, Tensor) or xs.ndim != 3 or dim not in (None, xs.shape[-1]) or not xs.is_floating_point():
        raise ValueError(f"{where}: got xs {_told(xs)}; expected a tensor {sizes} of floats. Reshape or convert it.")
    if not 1 <= xs.shape[1] <= (most or xs.shape[1]):
        raise ValueError(
            f"{where}: got xs {_told(xs)} with {xs.shape[1]} examples; expected {sizes} with K from 1 to "
            f"{most or 'any'}. Take fewer, or train with more `task.num_examples`."
        )
    wanted = (*xs.shape[:2], 1)
    if not isinstance(ys, Tensor) or tuple(ys.shape) != wanted or (ys.dtype, ys.device) != (xs.dtype, xs.device):
        advice = "Add the last axis: ys[..., None]." if _shape(ys) == wanted[:-1] else "Take those that belong to xs."
        raise ValueError(f"{where}: got ys {_told(ys)}; expected {_told(torch.empty_like(xs[..., :1]))}. {advice}")


def require_place(where: str, xs: Tensor, like: Tensor) -> None:
    """Raise ValueError unless xs has the dtype and the device of the parameters, of which `like` is one."""
    if (xs.dtype, xs.device) != (like.dtype, like.device):
        raise ValueError(
            f"{where}: got xs {_told(xs)}; expected {like.dtype} on {like.device} like the parameters. "
            "Move both to one place: xs.to(...), ys.to(...) or model.to(...)."
        )


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _told(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{tuple(value.shape)} {value.dtype} on {value.device}"
