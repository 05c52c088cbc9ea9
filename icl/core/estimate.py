"""What a run takes, from its spec alone, before anything is allocated. Whole numbers in closed form."""

from collections.abc import Mapping

import attrs

from icl.core.errors import SpecError
from icl.core.plan import evaluation_slices
from icl.core.spec import Spec

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

    state: parameters, two moments and gradients; off the processor the copies that are saved.
    pool: the task pool, while it is drawn and while it is compared with in float64.
    chunk: the batches of `run.max_chunk` steps, and their copy.
    evaluation: both evaluation sets with what they are compared with, and their copy; contexts for ridge regression.
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
    references = task.num_examples * (2 if task.num_tasks is None else 3)
    drawn_here = here or training.sampling == "host"
    return Estimate(
        parameters=parameters,
        state=(4 if here else 3) * _FLOAT * parameters,
        pool=3 * _FLOAT * (task.num_tasks or 0) * task.task_dim,
        chunk=2 * _FLOAT * spec.run.max_chunk * training.batch_size * sequence if drawn_here else 0,
        evaluation=2 * 2 * _FLOAT * spec.evaluation.batch_size * (sequence + references)
        + 2 * _FLOAT * task.num_examples**2 * task.task_dim,
        activations=_FLOAT * max(training.batch_size * _kept(spec), _evaluated(spec)) if here else 0,
    )


def count_parameters(spec: Spec) -> int:
    """How many numbers `icl.core.model.parameter_shapes` describes, whatever the number of layers."""
    model, dim, embed, hidden = spec.model, spec.task.task_dim, spec.model.embed_dim, spec.model.mlp_dim
    gpt2 = model.architecture == "raventos"
    block = 3 * embed * (embed + gpt2) + hidden * (embed + 1) + embed * (hidden + 1)
    block += embed * (embed + gpt2) if model.attention_output else 0
    block += 4 * embed if model.layer_norm else 0
    ends = embed * (dim + 1) + 2 * spec.task.num_examples * embed + (2 * embed if model.layer_norm else 0)
    return ends + model.num_layers * block + (embed if gpt2 else (dim + 1) * (embed + 1))


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
    for section, fields in _SIZES:
        own = getattr(spec, section)
        if any(getattr(own, field) is None for field in fields):
            continue
        smallest = {field: spec.model.num_heads if field == "embed_dim" else 1 for field in fields}
        if estimate(attrs.evolve(spec, **{section: attrs.evolve(own, **smallest)})).memory() <= available_bytes:
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


def _kept(spec: Spec) -> int:
    """Numbers that autograd keeps of one sequence: of each block what its products, softmax and norms differentiate."""
    model, examples = spec.model, spec.task.num_examples
    tokens, embed = 2 * examples - 1, model.embed_dim
    norms, mixed, gelu = int(model.layer_norm), int(model.attention_output), int(model.architecture == "raventos")

    def block(queries: int) -> int:
        by_token = (3 + norms) * embed  # keys, values, the block's input and that input normalised
        by_query = (2 + norms + mixed) * embed + (1 + gelu) * model.mlp_dim + model.num_heads * tokens
        return tokens * by_token + queries * by_query

    return (model.num_layers - 1) * block(tokens) + block(examples)


def _evaluated(spec: Spec) -> int:
    """Numbers in the attention scores of one block, for the sequences that are evaluated at once."""
    _, rows = evaluation_slices(spec.evaluation.batch_size)
    tokens = 2 * spec.task.num_examples - 1
    queries = spec.task.num_examples if spec.model.num_layers == 1 else tokens
    return rows * spec.model.num_heads * queries * tokens
