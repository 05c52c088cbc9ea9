"""Regression on two-layer ReLU networks."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import attrs

from icl.core.families import gaussian
from icl.core.rules import COUNT, as_float, choice, finite_or_none, number, optional, with_plain_values

if TYPE_CHECKING:
    import numpy as np
    from torch import Generator, Tensor

    from icl.core.backend import Tree
    from icl.core.family import Floats

DESCENT_STEPS = 100
DESCENT_RATE = 5e-3


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class ReLUNetworkTask:
    """y = sqrt(2 / r) a.relu(W x) + eps with r `hidden_dim` units; x ~ N(0, I_D), and N(0, 1) for all of W and a.

    A task is the rows of W and then a, r (D + 1) numbers.

    Source: Garg et al. 2022, with D = 20, r = 100 and no noise.
    """

    family: Literal["relu_network"] = attrs.field(
        default="relu_network", validator=choice("relu_network"), metadata={"help": "The task family."}
    )
    task_dim: int = attrs.field(validator=COUNT, metadata={"help": "D: dimension of x."})
    num_examples: int = attrs.field(
        validator=COUNT, metadata={"help": "K: in-context examples in a sequence; prediction k has seen k of them."}
    )
    num_tasks: int | None = attrs.field(
        default=None,
        converter=finite_or_none,
        validator=optional(COUNT),
        metadata={
            "help": 'M: tasks in the pretraining pool. null (or "inf"): every task is drawn afresh from the prior.'
        },
    )
    hidden_dim: int = attrs.field(default=100, validator=COUNT, metadata={"help": "r: units of a task's network."})
    noise_variance: float = attrs.field(
        default=0.0,
        converter=as_float,
        validator=number(0),
        metadata={"help": "sigma^2: variance of the label noise, not its standard deviation."},
    )

    @property
    def task_size(self) -> int:
        return self.hidden_dim * (self.task_dim + 1)

    @property
    def baselines(self) -> tuple[str, ...]:
        return ("gradient_descent", *gaussian.SIMPLE_BASELINES, *(() if self.num_tasks is None else ("dmmse",)))

    @property
    def equal_baselines(self) -> Mapping[str, str]:
        return {}

    @property
    def baseline_bytes(self) -> int:
        """Of gradient descent on one sequence: a network for each position, its gradient, and Adam's two moments."""
        return 4 * 4 * self.num_examples * self.task_size

    def draw_inputs(self, rng: "np.random.Generator", batch_size: int) -> "tuple[Floats, Floats]":
        return gaussian.draw_inputs(self, rng, batch_size)

    def draw_tasks(self, rng: "np.random.Generator", count: int) -> "Floats":
        return rng.standard_normal((count, self.task_size), "float32")

    def targets(self, xs: "Floats", noise: "Floats", ws: "Floats") -> "Floats":
        width = self.hidden_dim * self.task_dim
        inner = ws[:, :width].reshape(-1, self.hidden_dim, self.task_dim)
        ys = noise * math.sqrt(self.noise_variance)
        scale = math.sqrt(2 / self.hidden_dim)
        for unit in range(self.hidden_dim):  # not `@`: a fixed order of additions gives the same bits under any BLAS
            hidden = xs[:, :, 0] * inner[:, unit, 0, None]
            for d in range(1, self.task_dim):
                hidden += xs[:, :, d] * inner[:, unit, d, None]
            ys += hidden.clip(0) * (ws[:, width + unit, None] * scale)
        return ys

    def draw_on_device(self, batch_size: int, pool: "Tensor", generator: "Generator | None") -> "Tree":
        def prior(normal: gaussian.Normal) -> "Tensor":
            return normal(batch_size, self.task_size)

        return gaussian.draw_on_device(self, batch_size, pool, generator, prior, self._outputs)

    def predictions(self, xs: "Tensor", ys: "Tensor", pool: "Tensor | None") -> "Mapping[str, Tensor]":
        from icl.core.baselines import pool_predictions

        found = {
            "gradient_descent": descent_predictions(xs, ys, self.hidden_dim),
            **gaussian.simple_predictions(xs, ys),
        }
        if pool is not None:

            def outputs(x: "Tensor", tasks: "Tensor") -> "Tensor":
                inner, outer = _layers(tasks, self.task_dim)
                hidden = (x @ inner.reshape(-1, self.task_dim).T).relu().view(len(x), *outer.shape)
                return (hidden * outer).sum(-1)

            found["dmmse"] = pool_predictions(xs, ys, pool, self.noise_variance, outputs, self.hidden_dim)
        return found

    def _outputs(self, xs: "Tensor", ws: "Tensor") -> "Tensor":
        inner, outer = _layers(ws, self.task_dim)
        return ((xs @ inner.transpose(1, 2)).relu() @ outer[..., None])[..., 0]


def _layers(ws: "Tensor", task_dim: int) -> "tuple[Tensor, Tensor]":
    """W (n, r, D), and a (n, r) with the scale sqrt(2 / r) in it, of tasks (n, r (D + 1))."""
    hidden_dim = ws.shape[-1] // (task_dim + 1)
    inner, outer = ws[..., : hidden_dim * task_dim], ws[..., hidden_dim * task_dim :]
    return inner.reshape(*ws.shape[:-1], hidden_dim, task_dim), outer * math.sqrt(2 / hidden_dim)


def descent_predictions(xs: "Tensor", ys: "Tensor", hidden_dim: int) -> "Tensor":
    """The prediction of each y by a network of the family's shape, trained on the examples before it; 0 for k = 0.

    Each position of each sequence has a network of its own: 100 steps of Adam at a rate of 0.005 on the mean squared
    error over all examples before, in float32. All begin at the same W ~ N(0, 1) and a = 0, which is the function 0.
    Work O(B K^2 r D) a step; memory for a few sequences at a time.

    Args:
        xs: (B, K, D). ys: (B, K, 1). hidden_dim: r.

    Returns: (B, K, 1) float64.
    Source: Garg et al. 2022, whose code has these steps and this rate; their networks begin as PyTorch's.
    """
    import torch

    from icl.core.baselines import BYTE_BUDGET
    from icl.core.seeds import derive_generator

    examples, dim = xs.shape[1:]
    inner = derive_generator(0, "relu_network", "gradient_descent").standard_normal(hidden_dim * dim, "float32")
    start = torch.cat([torch.from_numpy(inner), torch.zeros(hidden_dim)]).to(xs.device)
    rows = max(1, BYTE_BUDGET // (4 * examples * hidden_dim * max(examples, dim + 1)))
    parts = [
        _descent(x.float(), y.float(), start) for x, y in zip(torch.split(xs, rows), torch.split(ys, rows), strict=True)
    ]
    return torch.cat(parts).double()


def _descent(xs: "Tensor", ys: "Tensor", start: "Tensor") -> "Tensor":
    import torch

    from icl.core.optimizers.adam import Adam

    batch, examples, dim = xs.shape
    rule, rate = Adam(), torch.tensor(DESCENT_RATE, device=xs.device)
    seen = torch.ones(examples, examples, device=xs.device).tril(-1)  # [k, i]: k has seen example i
    weights = seen / seen.sum(-1, keepdim=True).clamp(min=1)

    def outputs(params: "Tensor", inputs: "Tensor") -> "Tensor":
        """(B, K, I) of the networks (B, K, r (D + 1)) and inputs (B, D, I)."""
        inner, outer = _layers(params, dim)
        hidden = (inner.reshape(batch, -1, dim) @ inputs).relu().view(batch, examples, -1, inputs.shape[-1])
        return (outer[:, :, None] @ hidden)[:, :, 0]

    params = start.repeat(batch, examples, 1)
    state = rule.init(params)
    inputs = xs.transpose(1, 2)
    with torch.set_grad_enabled(True):
        for step in range(DESCENT_STEPS):
            params.requires_grad_()
            loss = ((outputs(params, inputs) - ys.transpose(1, 2)).square() * weights).sum()
            (grads,) = torch.autograd.grad(loss, params)
            params = params.detach()
            params, state = rule.update(params, grads, state, torch.tensor(step, device=xs.device), rate)
    return outputs(params, inputs).diagonal(dim1=1, dim2=2)[..., None]
