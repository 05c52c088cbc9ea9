"""What an experiment is, and how it is run: frozen data whose every field has a rule, with the papers' letters.

An `Experiment` (*what*) is hashed into the run's name. A `Spec` is one with its `run` half (*how*), which is not. The
task family, the architecture and the optimiser bring their own sections; a field of each names it.
"""

from typing import Any, Literal, TypeVar

import attrs

from icl.core.architecture import Architecture
from icl.core.architectures import ARCHITECTURES
from icl.core.architectures.timaeus import Timaeus
from icl.core.errors import SpecError
from icl.core.families import FAMILIES
from icl.core.family import TaskFamily
from icl.core.optimizer import Optimizer
from icl.core.optimizers import OPTIMIZERS
from icl.core.optimizers.adam import Adam
from icl.core.rules import (
    COUNT,
    SEED,
    TEXT,
    as_float,
    as_path,
    as_tuple,
    choice,
    integer,
    number,
    optional,
    tuple_of,
    with_plain_values,
)

_Whole = TypeVar("_Whole", bound="Experiment")


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class ScheduleSpec:
    """The learning rate over training, with its peak eta `learning_rate`; see `icl.core.schedules.learning_rate`."""

    name: Literal["one_cycle", "triangle", "constant", "warmup_cosine"] = attrs.field(
        default="one_cycle", validator=choice("one_cycle", "triangle", "constant", "warmup_cosine")
    )
    learning_rate: float = attrs.field(default=0.003, converter=as_float, validator=number(0))
    warmup_fraction: float = attrs.field(default=0.5, converter=as_float, validator=number(0, 1))


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class TrainingSpec:
    """`total_steps` updates on batches of B `batch_size` sequences."""

    total_steps: int = attrs.field(validator=integer(1, 2**24))  # a float32 holds every step exactly
    batch_size: int = attrs.field(default=256, validator=COUNT)
    matmul_precision: Literal["highest", "high", "medium"] = attrs.field(
        default="highest", validator=choice("highest", "high", "medium")
    )
    sampling: Literal["host", "device"] = attrs.field(default="host", validator=choice("host", "device"))
    optimizer: Optimizer = attrs.field(factory=Adam, metadata={"one_of": OPTIMIZERS, "by": "name"})
    schedule: ScheduleSpec = attrs.field(factory=ScheduleSpec)


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class SeedsSpec:
    """One root for each use of randomness; no two uses share a stream, whatever the roots."""

    init: int = attrs.field(default=0, validator=SEED)
    tasks: int = attrs.field(default=1, validator=SEED)
    sampling: int = attrs.field(default=2, validator=SEED)
    evaluation: int = attrs.field(default=3, validator=SEED)


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class EvaluationSpec:
    """The fixed evaluation sets: `batch_size` sequences in each."""

    batch_size: int = attrs.field(default=2048, validator=COUNT)


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class StepsSpec:
    """A cadence: `log` geometrically and `linear` evenly spaced steps, and those listed in `also`."""

    log: int = attrs.field(default=0, validator=integer(0))
    linear: int = attrs.field(default=0, validator=integer(0))
    also: tuple[int, ...] = attrs.field(default=(), converter=as_tuple, validator=tuple_of(integer(0)))


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class WandbSpec:
    """Where W&B mirrors the metrics; the account is the one that `wandb login` or WANDB_API_KEY names."""

    project: str = attrs.field(default="icl", validator=TEXT)
    entity: str | None = attrs.field(default=None, validator=optional(TEXT))
    group: str | None = attrs.field(default=None, validator=optional(TEXT))
    mode: Literal["online", "offline"] = attrs.field(default="online", validator=choice("online", "offline"))


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class RunSpec:
    """How and where: it changes no bit, except that another `backend` or number of `threads` rounds differently."""

    backend: str = attrs.field(default="cpu", validator=TEXT)
    threads: int | None = attrs.field(default=None, validator=optional(integer(1, 1024)))
    store: str = attrs.field(default="runs", converter=as_path, validator=TEXT)
    checkpoint_at: StepsSpec = attrs.field(factory=lambda: StepsSpec(log=50, linear=50))
    evaluate_at: StepsSpec = attrs.field(factory=lambda: StepsSpec(log=100, linear=100))
    log_every: int = attrs.field(default=100, validator=COUNT)
    save_state_every: int = attrs.field(default=1000, validator=COUNT)
    max_chunk: int = attrs.field(default=64, validator=integer(1, 4096))
    on_save_failure: Literal["stop", "continue"] = attrs.field(default="stop", validator=choice("stop", "continue"))
    heartbeat_seconds: float | None = attrs.field(
        default=10.0, converter=as_float, validator=optional(number(0, 60, above=True))
    )
    watchdog_seconds: float | None = attrs.field(
        default=None, converter=as_float, validator=optional(number(0, above=True))
    )
    grace_seconds: float = attrs.field(default=8.0, converter=as_float, validator=number(0, above=True))
    wandb: WandbSpec | None = attrs.field(default=None, metadata={"of": WandbSpec})


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class Experiment:
    """What is computed: every bit of a run on one backend is a function of it, and the run's name is its hash."""

    schema: int = attrs.field(default=1, validator=integer(1, 1))
    task: TaskFamily = attrs.field(metadata={"one_of": FAMILIES, "by": "family"})
    model: Architecture = attrs.field(factory=Timaeus, metadata={"one_of": ARCHITECTURES, "by": "architecture"})
    training: TrainingSpec
    seeds: SeedsSpec = attrs.field(factory=SeedsSpec)
    evaluation: EvaluationSpec = attrs.field(factory=EvaluationSpec)

    @property
    def experiment(self) -> "Experiment":
        """The experiment alone, without how it is run."""
        return Experiment(**{field.name: getattr(self, field.name) for field in attrs.fields(Experiment)})


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class Spec(Experiment):
    """One experiment and how to run it."""

    run: RunSpec = attrs.field(factory=RunSpec)

    def __attrs_post_init__(self) -> None:
        total = self.training.total_steps
        late = [
            f"run.{name}.also: got step {step}; expected at most training.total_steps={total}."
            for name in ("checkpoint_at", "evaluate_at")
            for step in getattr(self.run, name).also
            if step > total
        ]
        if late:
            raise SpecError(*late)


def with_fields(experiment: _Whole, section: str, **changes: Any) -> _Whole:
    """`experiment` with fields of one section, such as "task", replaced. Raises SpecError."""
    return attrs.evolve(experiment, **{section: attrs.evolve(getattr(experiment, section), **changes)})
