"""What an experiment is, and how it is run: frozen data whose every field has a rule and a help text.

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
        default="one_cycle",
        validator=choice("one_cycle", "triangle", "constant", "warmup_cosine"),
        metadata={"help": "Shape of the learning rate over training: see Schedules in docs/spec.md."},
    )
    learning_rate: float = attrs.field(
        default=0.003, converter=as_float, validator=number(0), metadata={"help": "eta: the peak learning rate."}
    )
    warmup_fraction: float = attrs.field(
        default=0.5,
        converter=as_float,
        validator=number(0, 1),
        metadata={
            "help": 'w: the part of the run in which the learning rate rises to eta; "constant" does not use it.'
        },
    )


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class TrainingSpec:
    """`total_steps` updates on batches of B `batch_size` sequences."""

    total_steps: int = attrs.field(
        validator=integer(1, 2**24),  # a float32 holds every step exactly
        metadata={"help": "N: updates of the parameters."},
    )
    batch_size: int = attrs.field(default=256, validator=COUNT, metadata={"help": "B: sequences in one update."})
    matmul_precision: Literal["highest", "high", "medium"] = attrs.field(
        default="highest",
        validator=choice("highest", "high", "medium"),
        metadata={"help": 'Precision of float32 matrix products; on the processor only "highest" is accepted.'},
    )
    sampling: Literal["host", "device"] = attrs.field(
        default="host",
        validator=choice("host", "device"),
        metadata={
            "help": '"host" draws the same batches for every backend; "device" draws with the generator of the device.'
        },
    )
    optimizer: Optimizer = attrs.field(
        default=Adam(),
        metadata={"help": "The optimiser and its hyperparameters.", "one_of": OPTIMIZERS, "by": "name"},
    )
    schedule: ScheduleSpec = attrs.field(default=ScheduleSpec(), metadata={"help": "The learning rate of each update."})


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class SeedsSpec:
    """One root for each use of randomness; no two uses share a stream, whatever the roots."""

    init: int = attrs.field(default=0, validator=SEED, metadata={"help": "Seed of the initial parameters."})
    tasks: int = attrs.field(default=1, validator=SEED, metadata={"help": "Seed of the task pool."})
    sampling: int = attrs.field(default=2, validator=SEED, metadata={"help": "Seed of the training batches."})
    evaluation: int = attrs.field(default=3, validator=SEED, metadata={"help": "Seed of the evaluation sets."})


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class EvaluationSpec:
    """The fixed evaluation sets: `batch_size` sequences in each."""

    batch_size: int = attrs.field(default=2048, validator=COUNT, metadata={"help": "Sequences in each evaluation set."})


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class StepsSpec:
    """A cadence: `log` geometrically and `linear` evenly spaced steps, and those listed in `also`."""

    log: int = attrs.field(
        default=0,
        validator=integer(0),
        metadata={"help": "How many steps are spaced geometrically from 1 to total_steps, ends included."},
    )
    linear: int = attrs.field(
        default=0,
        validator=integer(0),
        metadata={"help": "How many steps are spaced evenly from 0 to total_steps, ends included."},
    )
    also: tuple[int, ...] = attrs.field(
        default=(),
        converter=as_tuple,
        validator=tuple_of(integer(0)),
        metadata={"help": "Further steps, at most total_steps."},
    )


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class WandbSpec:
    """Where W&B mirrors the metrics; the account is the one that `wandb login` or WANDB_API_KEY names."""

    project: str = attrs.field(default="icl", validator=TEXT, metadata={"help": "The W&B project."})
    entity: str | None = attrs.field(
        default=None,
        validator=optional(TEXT),
        metadata={"help": "The W&B user or team. null: the default of the account."},
    )
    group: str | None = attrs.field(
        default=None, validator=optional(TEXT), metadata={"help": "The W&B group of the run. null: no group."}
    )
    mode: Literal["online", "offline"] = attrs.field(
        default="online",
        validator=choice("online", "offline"),
        metadata={
            "help": '"online", or "offline", which needs no account and leaves folders for the command wandb sync.'
        },
    )


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class RunSpec:
    """How and where: it changes no bit, except that another `backend` or number of `threads` rounds differently."""

    backend: str = attrs.field(
        default="cpu",
        validator=TEXT,
        metadata={
            "help": '"cpu", "cuda", "xla" (a TPU; the processor with PJRT_DEVICE=CPU), or "package.module:Class".'
        },
    )
    threads: int | None = attrs.field(
        default=None,
        validator=optional(integer(1, 1024)),
        metadata={
            "help": "Threads of PyTorch on the processor; bits depend on them (docs/performance.md). "
            "null: the choice of PyTorch within the allowed cores."
        },
    )
    store: str = attrs.field(
        default="runs",
        converter=as_path,
        validator=TEXT,
        metadata={
            "help": "Where runs are kept: a local path, gs://bucket/folder, or another fsspec URL (docs/store.md)."
        },
    )
    checkpoint_at: StepsSpec = attrs.field(
        default=StepsSpec(log=50, linear=50),
        metadata={"help": "Steps whose parameters are saved; more can be asked for later (docs/store.md)."},
    )
    evaluate_at: StepsSpec = attrs.field(
        default=StepsSpec(log=100, linear=100),
        metadata={"help": "Steps at which the model is evaluated; more can be asked for later."},
    )
    log_every: int = attrs.field(
        default=100,
        validator=COUNT,
        metadata={"help": "Steps between messages of progress; the loss of every update is kept in any case."},
    )
    save_state_every: int = attrs.field(
        default=1000,
        validator=COUNT,
        metadata={"help": "Steps between states to resume from; a killed run repeats at most so many."},
    )
    max_chunk: int = attrs.field(
        default=64,
        validator=integer(1, 4096),
        metadata={
            "help": "Largest number of updates in one compiled chunk; a signal to stop waits for at most one chunk."
        },
    )
    on_save_failure: Literal["stop", "continue"] = attrs.field(
        default="stop",
        validator=choice("stop", "continue"),
        metadata={
            "help": '"stop" when the store fails, or "continue" to train and to save what is missing once it works.'
        },
    )
    heartbeat_seconds: float | None = attrs.field(
        default=10.0,
        converter=as_float,
        validator=optional(number(0, 60, above=True)),
        metadata={"help": "Seconds between signs of life to other processes. null: none given, none looked for."},
    )
    watchdog_seconds: float | None = attrs.field(
        default=None,
        converter=as_float,
        validator=optional(number(0, above=True)),
        metadata={
            "help": "Seconds without the end of a chunk after which the process exits with code 75, as on a chip that "
            "was taken away; longer than any compilation, evaluation or baseline. null: no limit."
        },
    )
    grace_seconds: float = attrs.field(
        default=8.0,
        converter=as_float,
        validator=number(0, above=True),
        metadata={"help": "Seconds after SIGTERM or SIGINT in which a chunk may still end and be saved."},
    )
    wandb: WandbSpec | None = attrs.field(
        default=None,
        metadata={"help": "Mirrors the metrics to W&B (docs/sweeps.md). null: no mirror.", "of": WandbSpec},
    )


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class Experiment:
    """What is computed: every bit of a run on one backend is a function of it, and the run's name is its hash."""

    schema: int = attrs.field(default=1, validator=integer(1, 1), metadata={"help": "Version of this format."})
    task: TaskFamily = attrs.field(
        metadata={
            "help": "Which functions are learned in context, and from how many tasks.",
            "one_of": FAMILIES,
            "by": "family",
        }
    )
    model: Architecture = attrs.field(
        default=Timaeus(),
        metadata={"help": "The architecture and its sizes.", "one_of": ARCHITECTURES, "by": "architecture"},
    )
    training: TrainingSpec = attrs.field(metadata={"help": "How the model is trained."})
    seeds: SeedsSpec = attrs.field(
        default=SeedsSpec(),
        metadata={"help": "Seeds of the random streams, which share no bits even under equal seeds."},
    )
    evaluation: EvaluationSpec = attrs.field(default=EvaluationSpec(), metadata={"help": "The fixed evaluation sets."})

    @property
    def experiment(self) -> "Experiment":
        """The experiment alone, without how it is run."""
        return Experiment(**{field.name: getattr(self, field.name) for field in attrs.fields(Experiment)})


@attrs.frozen(kw_only=True, field_transformer=with_plain_values)
class Spec(Experiment):
    """One experiment and how to run it."""

    run: RunSpec = attrs.field(
        default=RunSpec(),
        metadata={"help": "How and where the run is computed and kept; it never changes the name of the run."},
    )

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
