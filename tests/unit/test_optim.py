"""Adam against torch.optim, and schedules at the lengths where others divide by zero."""

from typing import Any

import attrs
import pytest
import torch

from icl.core.optimizers.adam import Adam
from icl.core.optimizers.clipping import clip_by_global_norm
from icl.core.schedules import learning_rate
from icl.core.spec import ScheduleSpec

SCHEDULES = ("one_cycle", "triangle", "constant", "warmup_cosine")


def rates(name: Any, total: int, fraction: float = 0.5, peak: float = 1.0) -> list[float]:
    schedule = ScheduleSpec(name=name, learning_rate=peak, warmup_fraction=fraction)
    return [float(rate) for rate in learning_rate(schedule, total, torch.arange(total))]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.99, 0.9999)])
def test_adam_tracks_torch(weight_decay: float, betas: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    theirs = torch.randn(50, generator=generator, dtype=torch.float32).requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=betas, eps=1e-8, weight_decay=weight_decay)
    ours, rule = theirs.detach().clone(), Adam(betas=betas, weight_decay=weight_decay)
    state = rule.init(ours)
    for step in range(300):
        grads = torch.randn(50, generator=generator)
        theirs.grad = grads.clone()
        optimizer.step()
        ours, state = rule.update(ours, grads, state, torch.tensor(step), torch.tensor(1e-2))
    # 300 updates of 1e-2, each rounded to 6e-8 relative in another order of operations.
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


def test_a_gradient_of_zero_changes_nothing() -> None:
    params = torch.tensor([1.0, -2.0])
    zero = torch.zeros(2)
    new, state = Adam().update(params, zero, Adam().init(params), torch.tensor(0), torch.tensor(0.1))
    assert torch.equal(new, params)
    assert list(state) == ["mu", "nu"]
    assert not any(leaf.any() for leaf in state.values())


def test_hyperparameters_as_data_do_what_the_numbers_do() -> None:
    """Of one value for all, and of one a member, each of which is updated as if alone."""
    rules = [Adam(betas=(0.9, 0.99), weight_decay=0.1, max_grad_norm=0.5), Adam(betas=(0.0, 0.5), eps=1e-3)]
    rules[1] = attrs.evolve(rules[1], weight_decay=0.2, max_grad_norm=9.0)
    generator = torch.Generator().manual_seed(3)
    params, grads = torch.randn(2, 7, generator=generator), torch.randn(2, 7, generator=generator)
    state, step, lr = rules[0].init(params), torch.tensor([0, 4]), torch.tensor([0.1, 0.2])
    data = {name: torch.tensor([rule.hyperparameters[name] for rule in rules]) for name in rules[0].hyperparameters}
    together = rules[0].update(params, grads, state, step, lr, data)
    for i, rule in enumerate(rules):
        mine = {leaf: value[i] for leaf, value in state.items()}
        alone = rule.update(params[i], grads[i], mine, step[i], lr[i])
        single = {name: value[i] for name, value in data.items()}
        for found in (
            (together[0][i], {k: v[i] for k, v in together[1].items()}),
            rule.update(params[i], grads[i], mine, step[i], lr[i], single),
        ):
            # A float32 of 0.99 is 1e-8 off it, which is 1e-6 of 1 - 0.99.
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-7)


def test_clipping_tracks_torch() -> None:
    grads = torch.randn(40, generator=torch.Generator().manual_seed(2)) * 3
    theirs = torch.zeros(40, requires_grad=True)
    theirs.grad = grads.clone()
    torch.nn.utils.clip_grad_norm_([theirs], 1.5)
    torch.testing.assert_close(clip_by_global_norm(grads, 1.5), theirs.grad, rtol=1e-6, atol=0)
    assert torch.equal(clip_by_global_norm(grads, 1e6), grads)
    assert torch.equal(clip_by_global_norm(torch.zeros(3), 1.0), torch.zeros(3))


@pytest.mark.parametrize("total", [5, 6, 10, 101, 1000])
def test_one_cycle_tracks_torch(total: int) -> None:
    """The published call: linear, pct_start 0.5, both div factors N/2 - 1 (Hoogland et al. 2024)."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.003, total_steps=total, pct_start=0.5, anneal_strategy="linear", cycle_momentum=False,
        div_factor=total / 2 - 1, final_div_factor=total / 2 - 1,
    )  # fmt: skip
    theirs = []
    for step in range(total):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step + 1 < total:
            scheduler.step()
    # float32 against float64: a few roundings of the peak.
    assert rates("one_cycle", total, peak=0.003) == pytest.approx(theirs, abs=2e-7 * 0.003)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_short_runs_divide_by_nothing(name: str, total: int, fraction: float) -> None:
    """Field faults 37 and 38; earlier trainers, fault 11."""
    assert all(0 <= rate <= 1 for rate in rates(name, total, fraction))


def test_shapes_of_the_schedules() -> None:
    assert rates("triangle", 4) == [0.0, 0.5, 1.0, 0.5]
    assert rates("constant", 3) == [1.0, 1.0, 1.0]
    assert rates("warmup_cosine", 4) == pytest.approx([0.0, 0.5, 1.0, 0.5], abs=1e-7)
    assert rates("triangle", 4, fraction=0.0) == [1.0, 0.75, 0.5, 0.25]
