"""The step as a pure function: members, meta tensors, host reads, evaluation."""

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from icl.backends.cpu import CPUBackend
from icl.core.architectures.raventos import Raventos
from icl.core.backend import Tree, identical
from icl.core.families.linear import LinearTask
from icl.core.metrics import TRAINING_LOSS
from icl.core.optimizers.adam import Adam
from icl.core.spec import EvaluationSpec, Spec
from icl.core.step import build_eval, build_train, evaluation_tree, init_state, train_step
from icl.core.tasks import sample_batch, sample_batches, sample_task_pool
from icl.testing import StrictBackend, tiny_spec, with_training

ARCHITECTURES = {
    "timaeus": tiny_spec(),
    "raventos": tiny_spec(model=Raventos(num_heads=2, embed_dim=8)),
    "clipped": with_training(tiny_spec(), optimizer=Adam(weight_decay=0.1, max_grad_norm=0.5)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_members_train_as_if_alone(name: str) -> None:
    """Field faults 87 to 89: stacked runs equal solo runs, and no member depends on its neighbours."""
    spec = ARCHITECTURES[name]
    states = [init_state(spec) for _ in range(3)]
    for index, state in enumerate(states):
        state["params"] = state["params"] * (1 + index / 10)
    stacked = {key: torch.stack([state[key] for state in states]) for key in states[0]}
    for step in range(5):
        batches = [sample_batch(spec, 10 * step + member, None) for member in range(3)]
        batches[2]["ys"] = batches[2]["ys"] * float("nan")  # a poisoned member must not reach the others
        with torch.no_grad():
            stacked, losses = train_step(spec, stacked, {k: torch.stack([b[k] for b in batches]) for k in batches[0]})
            for member in range(2):
                states[member], alone = train_step(spec, states[member], batches[member])
                # vmap picks other kernels: float32 rounding of values about 1.
                torch.testing.assert_close(losses[TRAINING_LOSS][member], alone[TRAINING_LOSS], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(stacked["params"][member], states[member]["params"], rtol=1e-4, atol=1e-5)
    assert stacked["params"][2].isnan().any()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_reads_nothing_and_makes_no_stray_tensor(name: str, request: pytest.FixtureRequest) -> None:
    """Field faults 6 and 7: under fake tensors `.item()` raises, and so does a tensor on another device."""
    spec = ARCHITECTURES[name]
    state, batch = init_state(spec), sample_batch(spec, 0, None)
    gc.disable()  # PyTorch 2.9: a collection inside takes the attributes of fake tensors that the graph alone holds
    request.addfinalizer(gc.enable)
    with FakeTensorMode() as mode:
        fake_state: Tree = {key: mode.from_tensor(leaf) for key, leaf in state.items()}
        fake_batch: Tree = {key: mode.from_tensor(leaf) for key, leaf in batch.items()}
        new, metrics = train_step(spec, fake_state, fake_batch)
    assert {key: (leaf.shape, leaf.dtype) for key, leaf in new.items()} == {
        key: (leaf.shape, leaf.dtype) for key, leaf in state.items()
    }
    assert metrics[TRAINING_LOSS].shape == ()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_runs_on_the_device_of_its_inputs(name: str) -> None:
    spec = ARCHITECTURES[name]
    state = {key: leaf.to("meta") for key, leaf in init_state(spec).items()}
    batch = {key: leaf.to("meta") for key, leaf in sample_batch(spec, 0, None).items()}
    new, metrics = train_step(spec, state, batch)
    assert all(leaf.device.type == "meta" for leaf in (*new.values(), *metrics.values()))


def test_no_host_read_inside_chunks_or_evaluations() -> None:
    """Field faults 6 to 8: nothing waits for a value until a whole chunk or evaluation is fetched."""
    spec = tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=5))
    backend, pool = StrictBackend(), sample_task_pool(spec)
    advance, evaluate = build_train(spec, backend, num_steps=spec.run.max_chunk), build_eval(spec, backend, pool)
    batches = sample_batches(spec, range(3), pool, spec.run.max_chunk)
    state, _ = advance(backend.to_device(init_state(spec)), backend.to_device(batches), 3)
    evaluate(state)
    assert backend.host_reads == 0


class CountingBackend(CPUBackend):
    fetches = 0

    def to_cpu(self, tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.fetches += 1
        return super().to_cpu(tree)


@pytest.mark.parametrize("num_tasks", [None, 3])
@pytest.mark.parametrize("size", [1, 16, 5000])
def test_evaluation_is_one_fetch_and_the_plain_mean(num_tasks: int | None, size: int) -> None:
    """Earlier trainers, fault 9; sets larger than a slice are padded, and the padding does not count."""
    task = LinearTask(task_dim=3, num_examples=4, num_tasks=num_tasks)
    spec = tiny_spec(task=task, evaluation=EvaluationSpec(batch_size=size))
    backend, pool = CountingBackend(), sample_task_pool(spec)
    state = init_state(spec)
    metrics = build_eval(spec, backend, pool)(state)
    assert backend.fetches == 1
    names = ["mse", "delta_ridge", "delta_dmmse"]
    suffixes = ["", *(f"/token/{k}" for k in range(4))]
    assert set(metrics) == {f"{s}/{n}{t}" for s in ("pretrain", "true") for n in names for t in suffixes}
    for evaluation_set in ("pretrain", "true"):
        if num_tasks is None:  # dMMSE tends to ridge
            limits = {n: v for n, v in metrics.items() if "/delta_dmmse" in n}
            assert limits == {n: metrics[n.replace("/delta_dmmse", "/delta_ridge")] for n in limits}
        for index, name in enumerate(names if num_tasks else names[:2]):
            assert metrics[f"{evaluation_set}/{name}"] == pytest.approx(
                direct_metric(spec, evaluation_set, index, pool), rel=1e-5
            )  # float32 sums of up to 5000 terms against float64


def direct_metric(spec: Spec, evaluation_set: str, index: int, pool: torch.Tensor | None) -> float:
    from icl.core.model import init_params, predict
    from icl.core.tasks import sample_evaluation_batch

    batch = sample_evaluation_batch(spec, evaluation_set, pool)
    reference = evaluation_tree(spec, evaluation_set, pool)["references"].transpose(0, 1)[index].reshape(-1, 4)
    ys_pred = predict(spec.model, init_params(spec), batch["xs"], batch["ys"])[..., 0]
    return float((ys_pred.double() - reference[: len(ys_pred)]).square().mean())


def test_device_sampling_is_a_function_of_the_step() -> None:
    """Field fault 15: each step draws its own numbers, whatever was drawn before."""
    from icl.core.tasks import sample_batch_on_device, training_seed

    spec, backend = tiny_spec(), CPUBackend()

    def draw(step: int) -> dict[str, torch.Tensor]:
        return sample_batch_on_device(spec, torch.empty(0), backend.manual_seed(training_seed(spec, step)))

    first = draw(0)
    assert first["xs"].shape == (8, 4, 3)
    assert first["ys"].shape == (8, 4, 1)
    assert not identical(draw(1), first)
    assert identical(draw(0), first)
