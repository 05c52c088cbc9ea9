"""The training step, its fold over batches, and evaluation: what a backend is asked to compile."""

from collections.abc import Callable

import torch
from torch import Tensor

from icl.core.backend import Advance, Backend, Step, Tree
from icl.core.baselines import dmmse_predictions, ridge_predictions
from icl.core.metrics import TRAINING_LOSS, name_metrics, reference_names, squared_error, squared_gaps, with_limits
from icl.core.model import flatten_params, init_params, predict, unflatten_params
from icl.core.optim import adam_update, learning_rate
from icl.core.plan import evaluation_slices
from icl.core.spec import Spec
from icl.core.tasks import EVALUATION_SETS, sample_evaluation_batch

STATE_LEAVES = ("params", "mu", "nu", "step")


def init_state(spec: Spec) -> Tree:
    """The state at step 0 on the CPU: params, mu and nu (P,) float32 and step () int64, the number of updates done."""
    params = flatten_params(spec, init_params(spec))
    zeros = torch.zeros_like(params)
    return {"params": params, "mu": zeros, "nu": zeros.clone(), "step": torch.zeros((), dtype=torch.int64)}


def train_step(spec: Spec, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """One update: (state, batch) -> (new state, {"train/loss": ()}), the loss being that before the update.

    Pure, on the device of its inputs. With a leading axis of members on every leaf it trains each of them alone.

    Args:
        state: as `init_state`. batch: xs (B, K, D) and ys (B, K, 1).
    """

    def loss_of(vector: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
        return squared_error(predict(spec.model, unflatten_params(spec, vector), xs, ys), ys)

    training = spec.training
    with torch.set_grad_enabled(True):
        # Not torch.func.grad: it records the backward pass for a second derivative, 6 of 45 ms a step on the CPU.
        params = state["params"].detach().requires_grad_()
        losses = (loss_of if params.ndim == 1 else torch.vmap(loss_of))(params, batch["xs"], batch["ys"])
        (grads,) = torch.autograd.grad(losses.sum(), params)
    lr = learning_rate(training.schedule, training.total_steps, state["step"])
    new, mu, nu = adam_update(training.optimizer, state["params"], grads, state["mu"], state["nu"], state["step"], lr)
    return {"params": new, "mu": mu, "nu": nu, "step": state["step"] + 1}, {TRAINING_LOSS: losses.detach()}


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


def build_train(spec: Spec, backend: Backend) -> Advance:
    """`advance(state, batches, length)` on the backend, for batches of `run.max_chunk` rows."""
    return backend.compile_steps(lambda state, batch: train_step(spec, state, batch), num_steps=spec.run.max_chunk)


def evaluation_tree(spec: Spec, evaluation_set: str, pool: Tensor | None) -> Tree:
    """One evaluation set with what its predictions are compared with, cut into slices of equal size.

    Returns: xs (S, R, K, D), ys (S, R, K, 1), references (S, metrics, R, K) in the order of `reference_names`, and
        weights (S, R), 0 for the sequences that fill the last slice; float32 on the CPU.
    """
    batch = sample_evaluation_batch(spec, evaluation_set, pool)
    noise = spec.task.noise_variance
    references = [batch["ys"], ridge_predictions(batch["xs"], batch["ys"], noise)]
    if pool is not None:
        references.append(dmmse_predictions(batch["xs"], batch["ys"], pool, noise))
    size = spec.evaluation.batch_size
    slices, rows = evaluation_slices(size)

    def cut(leaf: Tensor) -> Tensor:
        padding = leaf.new_zeros(slices * rows - size, *leaf.shape[1:])
        return torch.cat([leaf, padding]).view(slices, rows, *leaf.shape[1:])

    stacked = torch.stack([reference[..., 0].to(torch.float32) for reference in references], dim=1)
    return {
        "xs": cut(batch["xs"]),
        "ys": cut(batch["ys"]),
        "references": cut(stacked).transpose(1, 2).contiguous(),
        "weights": cut(torch.ones(size, dtype=torch.float32)),
    }


def eval_step(spec: Spec, params: Tree, batch: Tree) -> Tree:
    """The sums over one slice of an evaluation set, {"sums": (metrics, K)}, from `params` {"params": (P,)}."""
    ys_pred = predict(spec.model, unflatten_params(spec, params["params"]), batch["xs"], batch["ys"])
    return {"sums": squared_gaps(ys_pred, batch["references"], batch["weights"])}


def build_eval(spec: Spec, backend: Backend, pool: Tensor | None) -> Callable[[Tree], dict[str, float]]:
    """`evaluate(state) -> {metric name: value}`, the evaluation sets and baselines being computed and uploaded once.

    One evaluation is one fetch from the device, whatever the number of sets, positions and metrics.
    """
    names = reference_names(spec.task.num_tasks)
    trees = {name: backend.to_device(evaluation_tree(spec, name, pool)) for name in EVALUATION_SETS}
    slices = [
        (name, {key: leaf[index].clone() for key, leaf in tree.items()})
        for name, tree in trees.items()
        for index in range(tree["xs"].shape[0])
    ]
    measure = backend.compile(lambda params, batch: eval_step(spec, params, batch))

    def evaluate(state: Tree) -> dict[str, float]:
        params = {"params": state["params"]}
        sums = {str(index): measure(params, batch)["sums"] for index, (_, batch) in enumerate(slices)}
        fetched = backend.to_cpu(sums)
        values: dict[str, float] = {}
        for name in EVALUATION_SETS:
            parts = [fetched[str(index)] for index, (owner, _) in enumerate(slices) if owner == name]
            means = torch.stack(parts).to(torch.float64).sum(0) / spec.evaluation.batch_size
            values |= name_metrics(name, names, means)
        return with_limits(spec.task.num_tasks, values)

    return evaluate
