"""More checkpoints and evaluations of a run than it was trained with: the bits that a denser run has, or a refusal."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from icl.backends.cpu import CPUBackend
from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.spec import Spec, StepsSpec
from icl.io.codec import with_run
from icl.io.errors import CheckpointError
from icl.io.names import run_name
from icl.io.rundir import read_run
from icl.io.states import run_states
from icl.io.store import open_store
from icl.io.tensors import pack
from icl.io.verify import verify_run
from icl.loop import execute
from icl.results import Run, load_run, train
from icl.testing import tiny_spec
from tests.unit.test_loop import stop_after

SPEC = tiny_spec(task=LinearTask(task_dim=3, num_examples=4, num_tasks=5))
DENSE = StepsSpec(linear=21)
MORE = StepsSpec(linear=3, also=(1, 7, 13))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(with_run(SPEC, checkpoint_at=DENSE, evaluate_at=DENSE), store=str(tmp_path_factory.mktemp("dense")))


def require_as_dense(run: Run, dense: Run, checkpoints: set[int], evaluations: set[int]) -> None:
    assert checkpoints <= {*run.steps}
    assert all(identical(run.params(step), dense.params(step)) for step in run.steps)
    ours, theirs = run.metrics(), dense.metrics()
    assert evaluations <= {*ours["pretrain/mse"].dropna().index}
    for name in ours.columns:
        column = ours[name].dropna()
        assert column.equals(theirs[name].loc[column.index])
    assert list(ours.index) == list(range(21))
    directory, _ = read_run(open_store(run.spec.run.store), run.name)
    assert list(verify_run(directory)) == []


def test_a_complete_run_gets_checkpoints_that_are_asked_for_later(dense: Run, store_url: str) -> None:
    spec = with_run(SPEC, store=store_url)
    execute(spec)
    assert execute(with_run(spec, checkpoint_at=MORE)).status == "complete"
    require_as_dense(load_run(store_url, run_name(spec)), dense, {0, 1, 7, 10, 13, 20}, {0, 10, 20})
    assert execute(with_run(spec, checkpoint_at=MORE)).status == "already_complete"


def test_a_complete_run_gets_evaluations_that_are_asked_for_later(dense: Run, store_url: str) -> None:
    spec = with_run(SPEC, store=store_url)
    execute(spec)
    assert execute(with_run(spec, evaluate_at=MORE)).status == "complete"
    require_as_dense(load_run(store_url, run_name(spec)), dense, {0, 10, 20}, {0, 1, 7, 10, 13, 20})
    assert execute(with_run(spec, evaluate_at=MORE)).status == "already_complete"


def test_an_interrupted_run_gets_those_behind_it(dense: Run, store_url: str) -> None:
    spec = with_run(SPEC, store=store_url)
    assert execute(spec, should_stop=stop_after(4)).step > 7
    outcome = execute(with_run(spec, checkpoint_at=MORE, evaluate_at=MORE))
    assert outcome.status == "complete"
    require_as_dense(load_run(store_url, outcome.run), dense, {0, 1, 7, 10, 13, 20}, {0, 1, 7, 10, 13, 20})


def test_an_evaluation_asked_for_at_a_saved_state_is_saved(dense: Run, store_url: str) -> None:
    none = with_run(SPEC, store=store_url, checkpoint_at=StepsSpec(), evaluate_at=StepsSpec())
    assert execute(none, should_stop=stop_after(3)).step == 7
    run = load_run(store_url, execute(with_run(none, evaluate_at=StepsSpec(also=(6,)))).run)
    require_as_dense(run, dense, {0, 20}, {0, 6, 20})


@given(data=st.data())
def test_whatever_is_asked_for_whenever_ends_as_asked_from_the_start(
    dense: Run, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    url = str(tmp_path_factory.mktemp("any"))
    also = st.lists(st.integers(0, 20), max_size=4).map(lambda steps: StepsSpec(also=tuple(steps)))
    for _ in range(data.draw(st.integers(1, 3))):
        changes = {"checkpoint_at": data.draw(also), "evaluate_at": data.draw(also)}
        execute(with_run(SPEC, store=url, **changes), should_stop=stop_after(data.draw(st.integers(1, 9))))
    last = with_run(SPEC, store=url, checkpoint_at=data.draw(also), evaluate_at=data.draw(also))
    run = load_run(url, execute(last).run)
    require_as_dense(run, dense, {0, 20, *last.run.checkpoint_at.also}, {0, 20, *last.run.evaluate_at.also})


def test_being_stopped_in_the_middle_loses_nothing(dense: Run, store_url: str) -> None:
    spec = with_run(SPEC, store=store_url)
    execute(spec)
    more, statuses = with_run(spec, checkpoint_at=DENSE, evaluate_at=DENSE, max_chunk=1), list[str]()
    while not statuses or statuses[-1] == "interrupted":
        statuses.append(execute(more, should_stop=stop_after(13)).status)
        assert len(statuses) < 20
    assert "interrupted" in statuses
    require_as_dense(load_run(store_url, run_name(spec)), dense, {*range(21)}, {*range(21)})


class OtherBackend(CPUBackend):
    """A backend that says it is another machine."""

    def describe(self) -> dict[str, str]:
        return super().describe() | {"torch": "another"}


def objects(url: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(url).rglob("*.safetensors")}


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("changes", [{"checkpoint_at": MORE}, {"evaluate_at": MORE}])
def test_another_backend_is_refused(tmp_path: Path, allow: bool, changes: dict[str, StepsSpec]) -> None:
    """Steps of one run never come from two machines; --allow-backend-change is about going on, not about this."""
    spec = with_run(SPEC, store=str(tmp_path))
    execute(spec)
    before = objects(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"torch .* -> another.*checkpoint_at, run\.evaluate_at"):
        execute(with_run(spec, **changes), backend=OtherBackend(), allow_backend_change=allow)
    assert objects(str(tmp_path)) == before
    assert execute(spec).status == "already_complete"


def test_a_run_that_is_not_met_bit_for_bit_gets_nothing(tmp_path: Path) -> None:
    """As where a machine computes other bits and does not say so."""
    spec = with_run(SPEC, store=str(tmp_path), checkpoint_at=StepsSpec())
    name = execute(spec).run
    run, _ = read_run(open_store(str(tmp_path)), name)
    path = run.step_path("checkpoints", 20)
    params, metadata = run.load("checkpoints", path)
    params["unembedding.weight"] = torch.nextafter(params["unembedding.weight"], torch.tensor(9.0))
    Path(tmp_path, path).write_bytes(pack(params, {k: v for k, v in metadata.items() if k != "tensors_sha256"}))
    before = objects(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"step-000000000020.*got other parameters.*Nothing was changed"):
        execute(with_run(spec, checkpoint_at=StepsSpec(also=(19,))))
    assert objects(str(tmp_path)) == before


def state_of(url: str, spec: Spec) -> tuple[str, str]:
    (state,) = run_states(open_store(url), [(run_name(spec), spec)])
    return state.status, state.note


def test_a_sweep_sees_that_more_is_asked_for(store_url: str) -> None:
    spec = with_run(SPEC, store=store_url)
    execute(spec)
    assert state_of(store_url, spec) == ("complete", "")
    more = with_run(spec, checkpoint_at=MORE, evaluate_at=MORE)
    assert state_of(store_url, more) == ("stopped", "3 checkpoints and evaluations asked for since it was completed")
    execute(more)
    assert state_of(store_url, more) == state_of(store_url, spec) == ("complete", "")


def test_going_on_elsewhere_works_before_the_first_state(dense: Run, store_url: str) -> None:
    """Early checkpoints are published, no state yet, and the process dies; another machine takes the run."""
    spec = with_run(SPEC, store=store_url, save_state_every=1000)

    def die_at(step: int, row: object) -> None:
        if step > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(spec, progress=die_at)
    name = run_name(spec)
    run, _ = read_run(open_store(store_url), name)
    assert (run.state_steps(), run.checkpoint_steps()) == ([], [0, 10])
    params, metadata = run.load("checkpoints", run.step_path("checkpoints", 10))
    params["unembedding.weight"] += 1  # so that the other machine's bits cannot be the same
    open_store(store_url).delete(run.step_path("checkpoints", 10))
    run.save_checkpoint(10, params, {key: metadata[key] for key in ("backend", "icl")})
    with pytest.raises(CheckpointError, match=r"at step 0: got another backend \(torch .*--allow-backend-change"):
        execute(spec, backend=OtherBackend())
    assert execute(spec, backend=OtherBackend(), allow_backend_change=True).status == "complete"
    require_as_dense(load_run(store_url, name), dense, {0, 10, 20}, {0, 10, 20})
    assert len(open_store(store_url).list(f"{name}/superseded")) == 1


def test_a_damaged_attempt_stops_nothing(dense: Run, tmp_path: Path) -> None:
    """What an attempt asked for is then looked up in the metrics."""
    spec = with_run(SPEC, store=str(tmp_path))
    name = execute(spec).run
    (attempt,) = [file for file in (tmp_path / name / "attempts").iterdir() if not file.name.endswith(".end.json")]
    attempt.write_bytes(b"{}")
    assert execute(spec).status == "already_complete"
    assert execute(with_run(spec, evaluate_at=MORE)).status == "complete"
    attempt.unlink()
    require_as_dense(load_run(str(tmp_path), name), dense, {0, 10, 20}, {0, 1, 7, 10, 13, 20})
