"""Small specs: one that trains in a moment, changes of it, and a strategy over the space of specs."""

from typing import Any

import attrs
from hypothesis import strategies as st

from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.families.linear import LinearTask
from icl.core.spec import EvaluationSpec, RunSpec, ScheduleSpec, SeedsSpec, Spec, StepsSpec, TrainingSpec


def tiny_spec(**changes: Any) -> Spec:
    """A spec that trains in a moment; `changes` replace whole sections (`model=Timaeus(...)`)."""
    sections: dict[str, Any] = {
        "task": LinearTask(task_dim=3, num_examples=4),
        "model": Timaeus(num_layers=2, num_heads=2, embed_dim=8),
        "training": TrainingSpec(total_steps=20, batch_size=8),
        "evaluation": EvaluationSpec(batch_size=16),
        "run": RunSpec(
            checkpoint_at=StepsSpec(linear=3),
            evaluate_at=StepsSpec(linear=3),
            log_every=7,
            save_state_every=6,
            max_chunk=4,
        ),
    }
    return Spec(**(sections | changes))


def with_training(spec: Spec, **changes: Any) -> Spec:
    """`spec` with fields of its `training` section replaced."""
    return attrs.evolve(spec, training=attrs.evolve(spec.training, **changes))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Small specs over the whole space of tasks, architectures and schedules."""
    heads = draw(st.integers(1, 3))
    sizes = {
        "num_layers": st.integers(1, 2),
        "num_heads": st.just(heads),
        "embed_dim": st.integers(1, 4).map(lambda size: heads * size),
        "mlp_dim": st.integers(1, 9),
    }
    return tiny_spec(
        task=LinearTask(
            task_dim=draw(st.integers(1, 5)),
            num_examples=draw(st.integers(1, 6)),
            num_tasks=draw(st.none() | st.integers(1, 9)),
            noise_variance=draw(st.sampled_from((0.0, 1e-12, 0.125, 2.0))),
        ),
        model=draw(
            st.builds(Timaeus, **sizes, layer_norm=st.booleans(), attention_output=st.booleans())
            | st.builds(Raventos, **sizes)
        ),
        training=TrainingSpec(
            total_steps=draw(st.integers(1, 12)),
            batch_size=draw(st.integers(1, 5)),
            schedule=ScheduleSpec(
                name=draw(st.sampled_from(("one_cycle", "triangle", "constant", "warmup_cosine"))),
                learning_rate=draw(st.sampled_from((0.0, 1e-3, 0.003))),
                warmup_fraction=draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))),
            ),
        ),
        seeds=SeedsSpec(init=draw(st.integers(0, 2**64 - 1)), sampling=draw(st.integers(0, 99))),
    )
