"""Whether tensors are sequences of examples, said in words where a user hands them in."""

from torch import Tensor


def require_sequences(where: str, xs: object, ys: object, *, dim: int | None = None, most: int | None = None) -> None:
    """Raise ValueError unless xs is (B, K, D) and ys is (B, K, 1).

    Args:
        where: the function that was called, for the message.
        dim, most: D and the largest K, where they are given.
    """
    if not isinstance(xs, Tensor) or xs.ndim != 3 or dim not in (None, xs.shape[-1]):
        width = "D" if dim is None else dim
        raise ValueError(f"{where}: got xs {_told(xs)}; expected a tensor (B, K, {width}). Convert or reshape it.")
    batch, examples, _ = xs.shape
    if most is not None and not 1 <= examples <= most:
        raise ValueError(
            f"{where}: got xs {_told(xs)}; expected K from 1 to {most}, the positions it was trained on. "
            "Take fewer examples, or a run with more `task.num_examples`."
        )
    if not isinstance(ys, Tensor) or ys.shape != (batch, examples, 1):
        lacking = isinstance(ys, Tensor) and ys.shape == (batch, examples)
        raise ValueError(
            f"{where}: got ys {_told(ys)}; expected a tensor ({batch}, {examples}, 1) as xs is {tuple(xs.shape)}. "
            + ("Add the last axis: ys[..., None]." if lacking else "Take those that belong to xs.")
        )


def require_shape(where: str, output: object, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless what a part of a model has given is a tensor of that shape."""
    if not isinstance(output, Tensor) or output.shape != shape:
        raise ValueError(
            f"{where}: got output {_told(output)}; expected a tensor {shape}. Have the hook, or the module put in its "
            "place, return that shape."
        )


def require_place(where: str, like: Tensor, **inputs: Tensor) -> None:
    """Raise ValueError unless the inputs have the dtype and the device of the parameters, of which `like` is one."""
    for name, value in inputs.items():
        if (value.dtype, value.device) != (like.dtype, like.device):
            raise ValueError(
                f"{where}: got {name} {_told(value)}; expected {like.dtype} on {like.device} as the parameters. "
                f"Convert it, {name}.to(...), or the model, model.to(...)."
            )


def _told(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    return f"{tuple(value.shape)} {value.dtype} on {value.device}"
