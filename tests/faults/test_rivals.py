"""Two processes on one run: whatever one does between any two storage calls of the other, both end right."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from icl.attempt import attempt
from icl.core.architectures.timaeus import Timaeus
from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.model import init_params
from icl.core.spec import Spec, TrainingSpec
from icl.io.codec import with_run
from icl.io.manifest import Manifest
from icl.io.names import run_name
from icl.io.rundir import RunDir, open_run
from icl.io.store import Store, open_store
from icl.io.verify import verify_run
from icl.loop import execute
from tests.faults import storage
from tests.trees import METADATA, params, state

SPEC = Spec(
    task=LinearTask(task_dim=2, num_examples=2),
    model=Timaeus(num_layers=1, num_heads=1, embed_dim=4),
    training=TrainingSpec(total_steps=9),
)
CALLS = ("create", "read", "list", "delete")


def save(run: RunDir, *steps: int) -> None:
    """What training saves when it passes these steps, each following on from the last."""
    for start, stop in zip((0, *steps), steps, strict=False):
        run.save_checkpoint(stop, params(SPEC, stop), METADATA)
        run.save_segment(start, stop, torch.arange(start, stop, dtype=torch.float32), {}, METADATA)
        run.save_state(stop, state(SPEC, stop), METADATA)


def interrupted(monkeypatch: pytest.MonkeyPatch, call: int, rival: Callable[[], None]) -> list[str]:
    """Let `rival` act once, just before our storage call number `call`; returns the calls made, as they come."""
    made: list[str] = []

    def hooked(name: str) -> Callable[..., Any]:
        original = getattr(Store, name)

        def act(self: Store, *arguments: Any) -> Any:
            made.append(name)
            if len(made) == call + 1:
                with monkeypatch.context() as undone:
                    for other in CALLS:
                        undone.setattr(Store, other, originals[other])
                    rival()
            return original(self, *arguments)

        return act

    originals = {name: getattr(Store, name) for name in CALLS}
    for name in CALLS:
        monkeypatch.setattr(Store, name, hooked(name))
    return made


def work(run: RunDir) -> tuple[int, float]:
    """Resume, train on from there, and read the metrics; returns the step resumed from and the sum of the losses."""
    found = run.newest_state()
    step = found[0] if found else 0
    assert found is None or identical(found[1], state(SPEC, step))
    if step < 3:
        save(run, 3)
    save(run, 6, 9) if step < 6 else None
    rows = run.metrics()
    return step, sum(row["train/loss"] for row in rows.values())


@pytest.mark.parametrize("damaged", [False, True], ids=["intact", "damaged"])
def test_a_rival_may_act_between_any_two_storage_calls(
    store_url: str, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field fault 48: one process is steps behind another that publishes, and removes, the same states."""
    calls = 0
    for call in range(1000):
        run = open_run(open_store(f"{store_url}/{call}"), SPEC)
        save(run, 1, 2)
        if damaged:
            path = f"{run.name}/state/step-000000000002.safetensors"
            data = run.store.read(path)
            run.store.delete(path)
            run.store.create(path, data[:-1])
        with monkeypatch.context() as hooks:
            made = interrupted(hooks, call, lambda run=run: save(run, 3, 6, 9))  # type: ignore[misc]
            step, losses = work(run)
        assert step in ((1, 9) if damaged else (2, 9)), call
        assert losses == sum(range(9)), call
        assert list(verify_run(run)) == [] or damaged
        assert run.checkpoint_steps() == [1, 2, 3, 6, 9]
        assert run.state_steps()[-2:] == [6, 9]
        assert len(run.state_steps()) <= 3  # one more than kept when two removed at once
        calls = len(made)
        if call >= calls:
            break
    assert 20 < calls < 1000


TRAINED = attrs.evolve(storage.SPEC, run=attrs.evolve(storage.SPEC.run, heartbeat_seconds=60))


def test_a_run_that_was_taken_over_ends_as_anothers_and_not_as_a_fault_of_the_store(store_url: str) -> None:
    """Two that both think they own it: the other went on from a state before, on another backend, with other bits."""
    name = run_name(TRAINED)
    store = open_store(store_url)

    def take_over(step: int, row: object) -> None:
        if step == 2:
            (mine,) = store.list(f"{name}/owner")
            store.create(f"{name}/owner/{int(mine.removesuffix('.json')) + 1:012d}.json", b'{"token": "another"}')
            RunDir(store, name).save_checkpoint(3, init_params(TRAINED), {"backend": '{"backend": "another"}'})

    ending = attempt(with_run(TRAINED, store=store_url), progress=take_over)
    assert (ending.code, ending.status) == (6, "running_elsewhere"), ending.error
    assert ending.error is not None
    assert "Nothing saved is harmed" in ending.error
    assert list(verify_run(RunDir(store, name))) == []
    (attempt_there,) = Manifest(store, name).attempts()
    assert "status" not in attempt_there  # it was cut off, and the run has not failed


def test_what_goes_wrong_in_a_run_that_was_taken_over_fails_nothing(store_url: str) -> None:
    store, name = open_store(store_url), run_name(TRAINED)

    def take_over(step: int, row: object) -> None:
        (mine,) = store.list(f"{name}/owner")
        store.create(f"{name}/owner/{int(mine.removesuffix('.json')) + 1:012d}.json", b'{"token": "another"}')
        raise ArithmeticError("as any other fault")

    with pytest.raises(ArithmeticError):
        execute(with_run(TRAINED, store=store_url), progress=take_over)
    assert Manifest(store, name).last_error() is None
