"""What an experiment is: frozen data whose every field has a rule. The papers' letters stand beside the names.

Everything but `run` (the *what*-half) defines the experiment and is hashed into its name; `run` (*how*) is not.
"""

import math
import re
from collections.abc import Callable
from typing import Any, Literal

import attrs

from icl.core.errors import SpecError

MAX_INT = 2**31 - 1


@attrs.frozen
class Rule:
    """What a field accepts: as a test, in words, and as JSON Schema. Used as the field's attrs validator."""

    accepts: Callable[[Any], bool]
    expected: str
    schema: dict[str, Any]

    def __call__(self, instance: object, attribute: "attrs.Attribute[Any]", value: object) -> None:
        if not self.accepts(value):
            raise SpecError(f"{attribute.name}: got {value!r}; expected {self.expected}. Correct the value.")


def integer(low: int, high: int = MAX_INT) -> Rule:
    """An integer in [low, high]; `True` and `1.0` are none."""
    return Rule(
        lambda value: type(value) is int and low <= value <= high,
        f"an integer from {low} to {high}",
        {"type": "integer", "minimum": low, "maximum": high},
    )


def _number(low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> Rule:
    """A finite float in [low, high]; `above` and `below` leave out the ends."""

    def accepts(value: object) -> bool:
        if type(value) is not float or not math.isfinite(value):
            return False
        return (low < value if above else low <= value) and (value < high if below else value <= high)

    words = f"a finite number {'>' if above else '>='} {low:g}"
    schema: dict[str, Any] = {"type": "number", "exclusiveMinimum" if above else "minimum": low}
    if math.isfinite(high):
        words += f" and {'<' if below else '<='} {high:g}"
        schema["exclusiveMaximum" if below else "maximum"] = high
    return Rule(accepts, words, schema)


def optional(rule: Rule) -> Rule:
    """What `rule` accepts, or None."""
    return Rule(
        lambda value: value is None or rule.accepts(value),
        f"{rule.expected}, or null",
        {"anyOf": [rule.schema, {"type": "null"}]},
    )


def _tuple_of(rule: Rule, length: int | None = None) -> Rule:
    def accepts(value: object) -> bool:
        return isinstance(value, tuple) and length in (None, len(value)) and all(map(rule.accepts, value))

    schema: dict[str, Any] = {"type": "array", "items": rule.schema}
    if length is not None:
        schema |= {"minItems": length, "maxItems": length}
    return Rule(accepts, f"a list of {'' if length is None else f'{length} times '}{rule.expected}", schema)


def _choice(*values: str) -> Rule:
    return Rule(
        lambda value: type(value) is str and value in values,
        "one of " + ", ".join(f'"{value}"' for value in values),
        {"enum": list(values)},
    )


_BOOLEAN = Rule(lambda value: type(value) is bool, "true or false", {"type": "boolean"})
_TEXT = Rule(
    lambda value: type(value) is str and bool(value.strip()) and not re.search("[\0-\x1f\x7f\ud800-\udfff]", value),
    "a non-empty string without control characters",
    {"type": "string", "pattern": r"^[^\u0000-\u001f\u007f]+$"},
)
_SEED = integer(0, 2**64 - 1)
_COUNT = integer(1)
_PYTHON: dict[str, Callable[[Any], Any]] = {"b": bool, "i": int, "u": int, "f": float, "U": str}


def plain(value: Any) -> Any:
    """NumPy's numbers and strings as Python's, alone, in a list or in an array; the rules judge what they are."""
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", None) == 1:
        return [_plain_scalar(item) for item in value]
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    convert = _PYTHON.get(getattr(getattr(value, "dtype", None), "kind", ""))
    return convert(value) if convert and value.ndim == 0 else value


def _float(value: Any) -> Any:
    """`1` and `1.0`, `0.0` and `-0.0` are one number; anything but an integer is left for the rule to judge."""
    return float(value) + 0.0 if type(value) in (int, float) and abs(value) <= 2**1023 else value


def _floats(value: Any) -> Any:
    return tuple(map(_float, value)) if isinstance(value, (list, tuple)) else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _path(value: Any) -> Any:
    return value.__fspath__() if hasattr(value, "__fspath__") else value


def _finite_or_none(value: Any) -> Any:
    """Infinite task diversity has one spelling inside: None."""
    infinite = (type(value) is str and value in ("inf", "Infinity")) or (type(value) is float and value == math.inf)
    return None if infinite else value


def _with_plain_values(_: type, fields: "list[attrs.Attribute[Any]]") -> "list[attrs.Attribute[Any]]":
    """The fields of a section, whose values are made plain before their own converter, if they have one, sees them."""

    def with_plain_values(field: "attrs.Attribute[Any]") -> "attrs.Attribute[Any]":
        if not isinstance(field.validator, Rule):  # a section
            return field
        own: Any = field.converter or _unchanged
        return field.evolve(converter=lambda value: own(plain(value)))

    return list(map(with_plain_values, fields))


def _unchanged(value: Any) -> Any:
    return value


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class TaskSpec:
    """y = w.x + eps with x ~ N(0, I_D), eps ~ N(0, sigma^2): D `task_dim`, K `num_examples`, M `num_tasks`, sigma^2."""

    task_dim: int = attrs.field(validator=_COUNT)
    num_examples: int = attrs.field(validator=_COUNT)
    num_tasks: int | None = attrs.field(default=None, converter=_finite_or_none, validator=optional(_COUNT))
    noise_variance: float = attrs.field(default=0.125, converter=_float, validator=_number(0))


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class ModelSpec:
    """A decoder-only transformer: L `num_layers`, H `num_heads`, E `embed_dim`."""

    architecture: Literal["timaeus", "raventos"] = attrs.field(
        default="timaeus", validator=_choice("timaeus", "raventos")
    )
    num_layers: int = attrs.field(default=2, validator=integer(1, 4096))  # so that listing parameters is quick
    num_heads: int = attrs.field(default=4, validator=_COUNT)
    embed_dim: int = attrs.field(default=64, validator=_COUNT)
    mlp_dim: int = attrs.field(validator=_COUNT)
    layer_norm: bool = attrs.field(default=True, validator=_BOOLEAN)
    attention_output: bool = attrs.field(default=True, validator=_BOOLEAN)

    @mlp_dim.default
    def _mlp_dim(self) -> int:
        return 4 * self.embed_dim if self.architecture == "raventos" else self.embed_dim

    def __attrs_post_init__(self) -> None:
        faults = []
        if self.embed_dim % self.num_heads:
            faults.append(f"num_heads: got {self.num_heads}; expected a divisor of embed_dim={self.embed_dim}.")
        if self.architecture == "raventos":
            faults += [
                f'{name}: got false; expected true, which architecture "raventos" always has.'
                for name in ("layer_norm", "attention_output")
                if not getattr(self, name)
            ]
        if faults:
            raise SpecError(*faults)


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class OptimizerSpec:
    """Adam; `weight_decay` is decoupled (AdamW) and `max_grad_norm` clips the global norm. Both are off by default."""

    name: Literal["adam"] = attrs.field(default="adam", validator=_choice("adam"))
    betas: tuple[float, float] = attrs.field(
        default=(0.9, 0.999), converter=_floats, validator=_tuple_of(_number(0, 1, below=True), 2)
    )
    eps: float = attrs.field(default=1e-8, converter=_float, validator=_number(0, above=True))
    weight_decay: float = attrs.field(default=0.0, converter=_float, validator=_number(0))
    max_grad_norm: float | None = attrs.field(
        default=None, converter=_float, validator=optional(_number(0, above=True))
    )


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class ScheduleSpec:
    """The learning rate over training, with its peak eta `learning_rate`; see `icl.core.optim.learning_rate`."""

    name: Literal["one_cycle", "triangle", "constant", "warmup_cosine"] = attrs.field(
        default="one_cycle", validator=_choice("one_cycle", "triangle", "constant", "warmup_cosine")
    )
    learning_rate: float = attrs.field(default=0.003, converter=_float, validator=_number(0))
    warmup_fraction: float = attrs.field(default=0.5, converter=_float, validator=_number(0, 1))


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class TrainingSpec:
    """`total_steps` updates on batches of B `batch_size` sequences."""

    total_steps: int = attrs.field(validator=integer(1, 2**24))  # a float32 holds every step exactly
    batch_size: int = attrs.field(default=256, validator=_COUNT)
    matmul_precision: Literal["highest", "high", "medium"] = attrs.field(
        default="highest", validator=_choice("highest", "high", "medium")
    )
    sampling: Literal["host", "device"] = attrs.field(default="host", validator=_choice("host", "device"))
    optimizer: OptimizerSpec = attrs.field(factory=OptimizerSpec)
    schedule: ScheduleSpec = attrs.field(factory=ScheduleSpec)


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class SeedsSpec:
    """One root for each use of randomness; no two uses share a stream, whatever the roots."""

    init: int = attrs.field(default=0, validator=_SEED)
    tasks: int = attrs.field(default=1, validator=_SEED)
    sampling: int = attrs.field(default=2, validator=_SEED)
    evaluation: int = attrs.field(default=3, validator=_SEED)


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class EvaluationSpec:
    """The fixed evaluation sets: `batch_size` sequences in each."""

    batch_size: int = attrs.field(default=2048, validator=_COUNT)


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class StepsSpec:
    """A cadence: `log` geometrically and `linear` evenly spaced steps, and those listed in `also`."""

    log: int = attrs.field(default=0, validator=integer(0))
    linear: int = attrs.field(default=0, validator=integer(0))
    also: tuple[int, ...] = attrs.field(default=(), converter=_as_tuple, validator=_tuple_of(integer(0)))


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class WandbSpec:
    """Where W&B mirrors the metrics; the account is the one that `wandb login` or WANDB_API_KEY names."""

    project: str = attrs.field(default="icl", validator=_TEXT)
    entity: str | None = attrs.field(default=None, validator=optional(_TEXT))
    group: str | None = attrs.field(default=None, validator=optional(_TEXT))
    mode: Literal["online", "offline"] = attrs.field(default="online", validator=_choice("online", "offline"))


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class RunSpec:
    """How and where: it changes no bit, except that another `backend` or number of `threads` rounds differently."""

    backend: str = attrs.field(default="cpu", validator=_TEXT)
    threads: int | None = attrs.field(default=None, validator=optional(integer(1, 1024)))
    store: str = attrs.field(default="runs", converter=_path, validator=_TEXT)
    checkpoint_at: StepsSpec = attrs.field(factory=lambda: StepsSpec(log=50, linear=50))
    evaluate_at: StepsSpec = attrs.field(factory=lambda: StepsSpec(log=100, linear=100))
    log_every: int = attrs.field(default=100, validator=_COUNT)
    save_state_every: int = attrs.field(default=1000, validator=_COUNT)
    max_chunk: int = attrs.field(default=64, validator=integer(1, 4096))
    on_save_failure: Literal["stop", "continue"] = attrs.field(default="stop", validator=_choice("stop", "continue"))
    heartbeat_seconds: float | None = attrs.field(
        default=10.0, converter=_float, validator=optional(_number(0, 60, above=True))
    )
    watchdog_seconds: float | None = attrs.field(
        default=None, converter=_float, validator=optional(_number(0, above=True))
    )
    grace_seconds: float = attrs.field(default=8.0, converter=_float, validator=_number(0, above=True))
    wandb: WandbSpec | None = attrs.field(default=None, metadata={"of": WandbSpec})


@attrs.frozen(kw_only=True, field_transformer=_with_plain_values)
class Spec:
    """One experiment and how to run it."""

    schema: int = attrs.field(default=1, validator=integer(1, 1))
    task: TaskSpec
    model: ModelSpec = attrs.field(factory=ModelSpec)
    training: TrainingSpec
    seeds: SeedsSpec = attrs.field(factory=SeedsSpec)
    evaluation: EvaluationSpec = attrs.field(factory=EvaluationSpec)
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
