"""Small specs: one that trains in a moment, changes of it, and a strategy over the space of specs."""

from typing import Any

import attrs
from hypothesis import strategies as st

from icl.core.spec import (
    EvaluationSpec,
    ModelSpec,
    RunSpec,
    ScheduleSpec,
    SeedsSpec,
    Spec,
    StepsSpec,
    TaskSpec,
    TrainingSpec,
)


def tiny_spec(**changes: Any) -> Spec:
    """A spec that trains in a moment; `changes` replace whole sections (`model=ModelSpec(...)`)."""
    sections: dict[str, Any] = {
        "task": TaskSpec(task_dim=3, num_examples=4),
        "model": ModelSpec(num_layers=2, num_heads=2, embed_dim=8),
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
    architecture: Any = draw(st.sampled_from(("timaeus", "raventos")))
    plain = architecture == "timaeus"
    return tiny_spec(
        task=TaskSpec(
            task_dim=draw(st.integers(1, 5)),
            num_examples=draw(st.integers(1, 6)),
            num_tasks=draw(st.none() | st.integers(1, 9)),
            noise_variance=draw(st.sampled_from((0.0, 1e-12, 0.125, 2.0))),
        ),
        model=ModelSpec(
            architecture=architecture,
            num_layers=draw(st.integers(1, 2)),
            num_heads=heads,
            embed_dim=heads * draw(st.integers(1, 4)),
            mlp_dim=draw(st.integers(1, 9)),
            layer_norm=draw(st.booleans()) if plain else True,
            attention_output=draw(st.booleans()) if plain else True,
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
