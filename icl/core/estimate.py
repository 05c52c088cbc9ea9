"""What a run takes, from its spec alone, before anything is allocated. Whole numbers in closed form."""

import math
from collections.abc import Mapping

import attrs

from icl.core.errors import SpecError
from icl.core.plan import evaluation_slices
from icl.core.spec import Experiment, Spec, with_fields

_FLOAT = 4
_PARTS = ("state", "pool", "chunk", "evaluation", "activations")
_SIZES = (  # fields that make a run large, and their section; first the one that changes nothing else
    ("run", ("max_chunk",)),
    ("task", ("num_examples",)),
    ("task", ("task_dim",)),
    ("task", ("num_tasks",)),
    ("model", ("num_layers",)),
    ("model", ("mlp_dim",)),
    ("model", ("embed_dim", "mlp_dim")),
    ("training", ("batch_size",)),
    ("evaluation", ("batch_size",)),
)


@attrs.frozen
class Estimate:
    """Bytes of memory on the host, none more than a run really holds at its peak; and how many parameters it trains.

    state: parameters, the optimiser's state and gradients; off the processor the copies that are saved.
    pool: the task pool, while it is drawn and while it is compared with in float64.
    chunk: the batches of `run.max_chunk` steps, and their copy.
    evaluation: both evaluation sets with what they are compared with, and their copy; what computing baselines takes.
    activations: what one step keeps for its backward pass, or the attention of an evaluation; 0 off the processor.
    """

    parameters: int
    state: int
    pool: int
    chunk: int
    evaluation: int
    activations: int

    def parts(self) -> Mapping[str, int]:
        """The bytes of each part, by name."""
        return {name: getattr(self, name) for name in _PARTS}

    def memory(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts().values())

    def describe(self) -> str:
        """The memory, and its parts from the largest on."""
        parts = sorted(self.parts().items(), key=lambda part: -part[1])
        return f"{format_bytes(self.memory())} of memory ({', '.join(f'{k} {format_bytes(v)}' for k, v in parts)})"


def estimate(spec: Spec) -> Estimate:
    """What training `spec` takes, at least, on the host."""
    task, training = spec.task, spec.training
    parameters = count_parameters(spec)
    here = spec.run.backend == "cpu"
    sequence = task.num_examples * (task.task_dim + 1)
    references = task.num_examples * (1 + len(task.baselines))
    drawn_here = here or training.sampling == "host"
    return Estimate(
        parameters=parameters,
        state=(2 + len(training.optimizer.leaves) - (not here)) * _FLOAT * parameters,
        pool=3 * _FLOAT * (task.num_tasks or 0) * task.task_size,
        chunk=2 * _FLOAT * spec.run.max_chunk * training.batch_size * sequence if drawn_here else 0,
        evaluation=2 * 2 * _FLOAT * spec.evaluation.batch_size * (sequence + references) + task.baseline_bytes,
        activations=_FLOAT * _activations(spec) if here else 0,
    )


def count_parameters(experiment: Experiment) -> int:
    """How many numbers `icl.core.model.parameter_shapes` describes, from those of one layer and of two."""
    task = experiment.task

    def count(num_layers: int) -> int:
        model = with_fields(experiment, "model", num_layers=num_layers).model
        return sum(map(math.prod, model.shapes(task.task_dim, task.num_examples).values()))

    one = count(1)
    return one + (experiment.model.num_layers - 1) * (count(2) - one)


def check_fits(spec: Spec, available_bytes: int | None) -> None:
    """Refuse a spec that takes more than the process may hold (`icl.machine.allowed_memory`); None allows everything.

    Raises: SpecError with the numbers, and the fields to lower.
    """
    needed = estimate(spec)
    if available_bytes is None or needed.memory() <= available_bytes:
        return
    raise SpecError(
        f"memory: got at least {needed.describe()}, with {needed.parameters:,} parameters; expected at most the "
        f"{format_bytes(available_bytes)} that this process may use. Lower {_what_to_lower(spec, available_bytes)}."
    )


def _what_to_lower(spec: Spec, available_bytes: int) -> str:
    """The fields of which each alone, made small, lets the spec fit; all that count where it takes several."""
    alone = []
    for section, sizes in _SIZES:
        own = getattr(spec, section)
        fields = [field for field in sizes if getattr(own, field, None) is not None]
        smallest = {field: spec.model.num_heads if field == "embed_dim" else 1 for field in fields}
        try:
            smaller = with_fields(spec, section, **smallest)
        except SpecError:  # a size that another field of the section does not allow
            continue
        if estimate(smaller).memory() <= available_bytes:
            alone.append(" with ".join(f"{section}.{field} (now {getattr(own, field)})" for field in fields))
    return " or ".join(alone) or "several of " + ", ".join(
        dict.fromkeys(f"{section}.{field}" for section, fields in _SIZES for field in fields)
    )


def format_bytes(count: int) -> str:
    """A number of bytes in decimal units, e.g. "1.5 GB"."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def _activations(experiment: Experiment) -> int:
    """Numbers that one step keeps for its backward pass, or the sequences that are evaluated at once hold."""
    model, examples = experiment.model, experiment.task.num_examples
    _, rows = evaluation_slices(experiment.evaluation.batch_size)
    return max(
        experiment.training.batch_size * model.activations(examples, backward=True),
        rows * model.activations(examples, backward=False),
    )
