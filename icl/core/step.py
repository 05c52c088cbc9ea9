"""The training step, its fold over batches, and evaluation: what a backend is asked to compile."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from icl.core.backend import Advance, Backend, Step, Tree
from icl.core.measurements import TARGETS, Compare, Measurement, grouped, standard_measurements
from icl.core.metrics import TRAINING_LOSS, name_metrics, squared_error, with_limits
from icl.core.model import flatten_params, init_params, predict, unflatten_params
from icl.core.plan import evaluation_slices
from icl.core.schedules import learning_rate
from icl.core.spec import Experiment
from icl.core.tasks import EVALUATION_SETS, sample_evaluation_batch


def state_leaves(experiment: Experiment) -> tuple[str, ...]:
    """The leaves of a state in the order of a program's inputs: params, the optimiser's own, step."""
    return ("params", *experiment.training.optimizer.leaves, "step")


def init_state(experiment: Experiment) -> Tree:
    """The state at step 0 on the CPU: params (P,), the optimiser's own leaves, and step () int64, the updates done."""
    params = flatten_params(experiment, init_params(experiment))
    own = experiment.training.optimizer.init(params)
    return {"params": params, **own, "step": torch.zeros((), dtype=torch.int64)}


def train_step(experiment: Experiment, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """One update: (state, batch) -> (new state, {"train/loss": ()}), the loss being that before the update.

    Pure, on the device of its inputs. With a leading axis of members on every leaf it trains each of them alone.

    Args:
        state: as `init_state`. batch: xs (B, K, D) and ys (B, K, 1).
    """

    def loss_of(vector: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
        return squared_error(predict(experiment.model, unflatten_params(experiment, vector), xs, ys), ys)

    training = experiment.training
    with torch.set_grad_enabled(True):
        # Not torch.func.grad: it records the backward pass for a second derivative, 6 of 45 ms a step on the CPU.
        params = state["params"].detach().requires_grad_()
        losses = (loss_of if params.ndim == 1 else torch.vmap(loss_of))(params, batch["xs"], batch["ys"])
        (grads,) = torch.autograd.grad(losses.sum(), params)
    lr = learning_rate(training.schedule, training.total_steps, state["step"])
    new, own = training.optimizer.update(state["params"], grads, state, state["step"], lr)
    return {"params": new, **own, "step": state["step"] + 1}, {TRAINING_LOSS: losses.detach()}


def fold_steps(step: Step, state: Tree, batches: Tree, length: int) -> tuple[Tree, Tree]:
    """The left fold of `step` over the first `length` >= 1 rows of `batches`: what every `compile_steps` must equal.

    Returns: the last state, and the metrics stacked along a leading axis as long as that of `batches`, then zeros.
    """
    num_rows = next(iter(batches.values())).shape[0]
    metrics = []
    for index in range(length):
        state, scalars = step(state, {key: leaf[index] for key, leaf in batches.items()})
        metrics.append(scalars)
    metrics += [{key: torch.zeros_like(value) for key, value in metrics[0].items()}] * (num_rows - length)
    return state, {key: torch.stack([scalars[key] for scalars in metrics]) for key in metrics[0]}


def build_train(experiment: Experiment, backend: Backend, *, num_steps: int) -> Advance:
    """`advance(state, batches, length)` on the backend, for batches of `num_steps` rows."""
    return backend.compile_steps(lambda state, batch: train_step(experiment, state, batch), num_steps=num_steps)


def evaluation_tree(
    experiment: Experiment, evaluation_set: str, pool: Tensor | None, measurements: Sequence[Measurement] | None = None
) -> Tree:
    """One evaluation set with what its predictions are compared with, cut into slices of equal size.

    Args:
        measurements: None for the standard ones.

    Returns: xs (S, R, K, D), ys (S, R, K, 1), references (S, measurements, R, K) in their order, and weights (S, R),
        0 for the sequences that fill the last slice; float32 on the CPU.
    """
    measured = standard_measurements(experiment.task) if measurements is None else measurements
    batch = sample_evaluation_batch(experiment, evaluation_set, pool)
    known = {TARGETS: batch["ys"], **experiment.task.predictions(batch["xs"], batch["ys"], pool)}
    size = experiment.evaluation.batch_size
    slices, rows = evaluation_slices(size)

    def cut(leaf: Tensor) -> Tensor:
        padding = leaf.new_zeros(slices * rows - size, *leaf.shape[1:])
        return torch.cat([leaf, padding]).view(slices, rows, *leaf.shape[1:])

    stacked = torch.stack([known[each.needs][..., 0].to(torch.float32) for each in measured], dim=1)
    return {
        "xs": cut(batch["xs"]),
        "ys": cut(batch["ys"]),
        "references": cut(stacked).transpose(1, 2).contiguous(),
        "weights": cut(torch.ones(size, dtype=torch.float32)),
    }


def eval_step(experiment: Experiment, compare: Compare, params: Tree, batch: Tree) -> Tree:
    """The sums over one slice of an evaluation set, {"sums": (measurements, K)}, from `params` {"params": (P,)}."""
    ys_pred = predict(experiment.model, unflatten_params(experiment, params["params"]), batch["xs"], batch["ys"])
    return {"sums": compare(ys_pred, batch["references"], batch["weights"])}


class Evaluate(Protocol):
    """`evaluate(state, step) -> {metric name: value}`."""

    def __call__(self, state: Tree, step: int | None = None) -> dict[str, float]:
        """What is due after `step` updates; everything without one."""
        ...


def build_eval(
    experiment: Experiment, backend: Backend, pool: Tensor | None, measurements: Sequence[Measurement] | None = None
) -> Evaluate:
    """`evaluate` on the backend, the evaluation sets and baselines being computed and uploaded once.

    One evaluation is one fetch from the device, whatever the number of sets, positions and metrics, and one program for
    all measurements that are compared alike and due together.

    Args:
        measurements: None for the standard ones.
    """
    measured = standard_measurements(experiment.task) if measurements is None else measurements
    trees = {name: evaluation_tree(experiment, name, pool, measured) for name in EVALUATION_SETS}
    programs = [_Program.build(experiment, backend, trees, measured, together) for together in grouped(measured)]

    def evaluate(state: Tree, step: int | None = None) -> dict[str, float]:
        params = {"params": state["params"]}
        due = [program for program in programs if step is None or program.measurements[0].is_due(step)]
        sums = {
            f"{place}/{index}": program.run(params, batch)["sums"]
            for place, program in enumerate(due)
            for index, (_, batch) in enumerate(program.slices)
        }
        fetched = backend.to_cpu(sums) if sums else {}
        values: dict[str, float] = {}
        for name in EVALUATION_SETS:
            for place, program in enumerate(due):
                own = [index for index, (owner, _) in enumerate(program.slices) if owner == name]
                parts = [fetched[f"{place}/{index}"] for index in own]
                means = torch.stack(parts).to(torch.float64).sum(0) / experiment.evaluation.batch_size
                for measurement, row in zip(program.measurements, means, strict=True):
                    values |= name_metrics(name, measurement.name, row)
        return with_limits(experiment.task, values)

    return evaluate


@attrs.frozen
class _Program:
    """Measurements that are computed at once, and the slices of each evaluation set on the device."""

    measurements: Sequence[Measurement]
    run: Callable[..., Tree]
    slices: Sequence[tuple[str, Tree]]

    @classmethod
    def build(
        cls,
        experiment: Experiment,
        backend: Backend,
        trees: Mapping[str, Tree],
        measured: Sequence[Measurement],
        together: Sequence[Measurement],
    ) -> "_Program":
        rows = [measured.index(each) for each in together]
        slices = []
        for name, tree in trees.items():
            there = backend.to_device({**tree, "references": tree["references"][:, rows]})
            slices += [
                (name, {key: leaf[index].clone() for key, leaf in there.items()})
                for index in range(there["xs"].shape[0])
            ]
        compare = together[0].compare
        return cls(
            together, backend.compile(lambda params, batch: eval_step(experiment, compare, params, batch)), slices
        )
