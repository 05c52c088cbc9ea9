"""Gradient descent with momentum: against torch.optim, and a whole run that is stopped and goes on."""

from pathlib import Path

import pytest
import torch

from icl.core.backend import identical
from icl.core.optimizers.sgd import SGD
from icl.io.codec import spec_from_data, spec_to_data, with_run
from icl.io.rundir import read_run
from icl.io.store import open_store
from icl.io.verify import verify_run
from icl.loop import execute
from icl.results import load_run
from icl.testing import tiny_spec, with_training

SPEC = with_training(tiny_spec(), optimizer=SGD(momentum=0.8, max_grad_norm=1.0))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_tracks_torch(momentum: float) -> None:
    generator = torch.Generator().manual_seed(1)
    theirs = torch.randn(50, generator=generator).requires_grad_()
    optimizer = torch.optim.SGD([theirs], lr=1e-2, momentum=momentum)
    rule, ours = SGD(momentum=momentum), theirs.detach().clone()
    state = rule.init(ours)
    for step in range(100):
        theirs.grad = torch.randn(50, generator=generator)
        grads = theirs.grad.clone()
        optimizer.step()
        ours, state = rule.update(ours, grads, state, torch.tensor(step), torch.tensor(1e-2))
    # 100 updates of up to 1e-1, each rounded to 6e-8 relative in another order of operations.
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


def test_members_have_momenta_and_bounds_of_their_own() -> None:
    params, grads = torch.ones(2, 3), torch.tensor([[3.0, 0.0, 4.0], [0.0, 1.0, 0.0]])
    state, data = {"velocity": torch.ones(2, 3)}, {"momentum": torch.tensor([0.5, 0.25])}
    data["max_grad_norm"] = torch.tensor([1.0, 2.0])
    together = SGD().update(params, grads, state, torch.tensor([0, 0]), torch.tensor([0.1, 0.2]), data)
    for i, rule in enumerate((SGD(momentum=0.5, max_grad_norm=1.0), SGD(momentum=0.25, max_grad_norm=2.0))):
        lr = torch.tensor([0.1, 0.2][i])
        alone = rule.update(params[i], grads[i], {"velocity": torch.ones(3)}, torch.tensor(0), lr)
        torch.testing.assert_close(together[0][i], alone[0])
        torch.testing.assert_close(together[1]["velocity"][i], alone[1]["velocity"])


def test_a_run_that_is_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    assert spec_from_data(spec_to_data(SPEC)) == SPEC
    whole, broken = (with_run(SPEC, store=str(tmp_path / name)) for name in ("whole", "broken"))
    execute(whole)
    countdown = iter([False, True])
    assert execute(broken, should_stop=lambda: next(countdown)).status == "interrupted"
    run, _ = read_run(open_store(broken.run.store), execute(broken).run)
    assert list(verify_run(run)) == []
    assert run.newest_state()[1].keys() == {"params", "velocity", "step"}  # type: ignore[index]
    ends = [load_run(spec.run.store, run.name).params(20) for spec in (whole, broken)]
    assert identical(*ends)
