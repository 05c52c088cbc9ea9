"""A run is a pure function of its spec: over the space of specs, interruptions and chunk plans."""

import uuid
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from icl.backends.cpu import CPUBackend
from icl.core.backend import Tree, identical
from icl.core.spec import Spec
from icl.core.step import build_eval, build_train, fold_steps, init_state, train_step
from icl.core.tasks import sample_batches, sample_task_pool
from icl.io.codec import decode_spec, encode_spec, with_run
from icl.io.names import run_name
from icl.loop import execute
from icl.results import load_run
from icl.testing import StrictBackend, specs


@given(specs())
def test_a_spec_survives_its_bytes(spec: Spec) -> None:
    assert decode_spec(encode_spec(spec)) == spec
    assert run_name(decode_spec(encode_spec(spec))) == run_name(spec)


@given(specs(), st.data())
def test_any_chunk_plan_gives_the_fold(spec: Spec, data: st.DataObject) -> None:
    pool, total = sample_task_pool(spec), spec.training.total_steps
    cuts = sorted(data.draw(st.sets(st.integers(0, total), max_size=4)) | {0, total})
    expected, losses = fold_steps(
        lambda s, b: _step(spec, s, b), init_state(spec), sample_batches(spec, range(total), pool), total
    )
    spec = with_run(spec, max_chunk=total + data.draw(st.integers(0, 3)))
    for backend in (CPUBackend(), StrictBackend()):
        advance, state = build_train(spec, backend, num_steps=spec.run.max_chunk), backend.to_device(init_state(spec))
        parts = []
        for start, stop in pairwise(cuts):
            batches = sample_batches(spec, range(start, stop), pool, spec.run.max_chunk)
            state, metrics = advance(state, backend.to_device(batches), stop - start)
            parts += metrics["train/loss"][: stop - start].tolist()
            assert not metrics["train/loss"][stop - start :].any()
        assert identical(backend.to_cpu(state), expected)
        assert parts == losses["train/loss"].tolist()
        assert build_eval(spec, backend, pool)(state).keys()


def _step(spec: Spec, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
    new, metrics = train_step(spec, state, {key: leaf.clone() for key, leaf in batch.items()})
    return {key: leaf.detach() for key, leaf in new.items()}, metrics


@settings(max_examples=10)
@given(specs(), st.lists(st.integers(1, 3), max_size=4))
def test_any_interruptions_give_the_same_run(spec: Spec, pauses: list[int]) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    whole = load_run(f"{root}/whole", execute(with_run(spec, store=f"{root}/whole")).run)
    broken = with_run(spec, store=f"{root}/broken")
    for pause in pauses:
        countdown = iter([False] * (pause - 1))
        stop = lambda countdown=countdown: next(countdown, True)  # noqa: E731
        execute(broken, backend=StrictBackend(), should_stop=stop)
    resumed = load_run(f"{root}/broken", execute(broken).run)
    assert resumed.steps == whole.steps
    assert all(identical(resumed.params(step), whole.params(step)) for step in whole.steps)
    assert resumed.metrics().equals(whole.metrics())
