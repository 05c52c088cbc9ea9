"""What a run takes, told from its spec: never more than it really takes, and refused before it is allocated."""

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from torch import Tensor

from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.errors import SpecError
from icl.core.estimate import Estimate, check_fits, count_parameters, estimate, format_bytes
from icl.core.families.linear import LinearTask
from icl.core.model import flatten_params, init_params, parameter_shapes, predict, unflatten_params
from icl.core.spec import EvaluationSpec, RunSpec, Spec, TrainingSpec
from icl.core.step import evaluation_tree, init_state
from icl.core.tasks import EVALUATION_SETS, sample_batches, sample_task_pool
from icl.testing import specs, tiny_spec

HUGE = 2**31 - 1
GB = 10**9


def size(tree: dict[str, Tensor]) -> int:
    return sum(leaf.nbytes for leaf in tree.values())


def kept_for_backward(spec: Spec) -> int:
    """Bytes of the tensors that autograd saves in one step, each memory once, beside the parameters."""
    params = flatten_params(spec, init_params(spec)).requires_grad_()
    batch = {key: leaf[0] for key, leaf in sample_batches(spec, range(1), sample_task_pool(spec)).items()}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        predict(spec.model, unflatten_params(spec, params), batch["xs"], batch["ys"])
    return sum(saved.values()) - saved.get(params.untyped_storage().data_ptr(), 0)


@given(specs())
def test_parameters_are_counted_as_they_are_laid_out(spec: Spec) -> None:
    assert count_parameters(spec) == sum(map(math.prod, parameter_shapes(spec).values()))


@given(specs())
def test_every_part_is_what_is_allocated(spec: Spec) -> None:
    pool, parts = sample_task_pool(spec), estimate(spec)
    state = init_state(spec)
    assert parts.state == 4 * state["params"].nbytes
    assert parts.pool == 3 * (0 if pool is None else pool.nbytes)
    assert parts.chunk == 2 * size(sample_batches(spec, range(1), pool, spec.run.max_chunk))
    trees = [evaluation_tree(spec, name, pool) for name in EVALUATION_SETS]
    weights = sum(tree["weights"].nbytes for tree in trees)
    contexts = 8 * spec.task.num_examples**2 * spec.task.task_dim
    assert parts.evaluation == 2 * (sum(map(size, trees)) - weights) + contexts


@pytest.mark.parametrize("attention_output", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_activations_are_no_more_than_autograd_keeps(num_layers: int, layer_norm: bool, attention_output: bool) -> None:
    model = Timaeus(num_layers=num_layers, layer_norm=layer_norm, attention_output=attention_output)
    check_activations(tiny_spec(task=LinearTask(task_dim=4, num_examples=12), model=model))


@pytest.mark.parametrize("num_layers", [1, 3])
def test_activations_of_raventos_are_no_more_than_autograd_keeps(num_layers: int) -> None:
    model = Raventos(num_layers=num_layers)
    check_activations(tiny_spec(task=LinearTask(task_dim=4, num_examples=12), model=model))


def check_activations(spec: Spec) -> None:
    found = kept_for_backward(attrs.evolve(spec, evaluation=EvaluationSpec(batch_size=1)))
    told = estimate(attrs.evolve(spec, evaluation=EvaluationSpec(batch_size=1))).activations
    # Not counted: the statistics of the norms, the token embedding and the read-out, and what other versions keep.
    assert 0.8 * found <= told <= found


BOMBS: dict[str, dict[str, Any]] = {
    "model.num_layers (now 4096)": {"model": Timaeus(num_layers=4096, embed_dim=2**13)},
    "model.embed_dim (now 2147483644) with model.mlp_dim": {"model": Timaeus(embed_dim=HUGE - 3)},
    "model.mlp_dim (now 2147483647)": {"model": Timaeus(mlp_dim=HUGE)},
    "training.batch_size (now 2147483647)": {"training": TrainingSpec(total_steps=1, batch_size=HUGE)},
    "evaluation.batch_size (now 2147483647)": {"evaluation": EvaluationSpec(batch_size=HUGE)},
    "task.num_tasks (now 2147483647)": {"task": LinearTask(task_dim=100, num_examples=4, num_tasks=HUGE)},
    "task.num_examples (now 2147483647)": {"task": LinearTask(task_dim=3, num_examples=HUGE)},
    "task.task_dim (now 2147483647)": {"task": LinearTask(task_dim=HUGE, num_examples=4)},
    "run.max_chunk (now 4096)": {
        "training": TrainingSpec(total_steps=1, batch_size=2**17),
        "run": RunSpec(max_chunk=4096),
    },
    "several of run.max_chunk, task.num_examples": {
        "model": Timaeus(num_layers=4096, embed_dim=2**14),
        "evaluation": EvaluationSpec(batch_size=HUGE),
    },
}


@pytest.mark.parametrize(("field", "changes"), BOMBS.items())
def test_what_cannot_fit_is_refused_with_the_field_to_lower(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"memory: got at least .* parameters; expected at most the 24 GB") as caught:
        check_fits(tiny_spec(**changes), 24 * GB)
    assert f"Lower {field}" in str(caught.value)


def test_a_limit_is_kept_to_the_byte_and_none_allows_everything() -> None:
    spec = tiny_spec()
    check_fits(spec, estimate(spec).memory())
    with pytest.raises(SpecError, match="memory"):
        check_fits(spec, estimate(spec).memory() - 1)
    check_fits(tiny_spec(model=Timaeus(embed_dim=HUGE - 3)), None)


@pytest.mark.parametrize("backend", ["cuda", "xla"])
def test_off_the_processor_the_hosts_part_counts(backend: str) -> None:
    training = TrainingSpec(total_steps=1, batch_size=2**20, sampling="device")
    there = tiny_spec(training=training, run=RunSpec(backend=backend))
    assert (estimate(there).activations, estimate(there).chunk) == (0, 0)
    check_fits(there, GB)
    assert estimate(attrs.evolve(there, run=RunSpec())).memory() > GB


def test_numbers_are_told_in_words() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 999_499, 999_600, 25_300_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "999 kB",
        "1 MB",
        "25.3 GB",
    ]
    told = Estimate(1, state=2, pool=0, chunk=3000, evaluation=0, activations=40).describe()
    assert told == "3.04 kB of memory (chunk 3 kB, activations 40 B, state 2 B, pool 0 B, evaluation 0 B)"
