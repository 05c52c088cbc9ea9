"""The golden files in this package's names: made by running the two public reference implementations.

timaeus-research/icl at 5baf730 and mansheej/icl-task-diversity at 7c35803; the settings are in each file's metadata.
"""

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open

from icl.core.architectures.raventos import Raventos
from icl.core.architectures.timaeus import Timaeus
from icl.core.families.linear import LinearTask
from icl.core.optimizers.adam import Adam
from icl.core.spec import ScheduleSpec, SeedsSpec, Spec, TrainingSpec
from icl.io.formats import FORMATS, decode_params

DATA = Path(__file__).parent.parent / "data"
NAMES = ("timaeus-L2H4", "timaeus-L1H2-no-layernorm", "raventos-L2H2")


@attrs.frozen
class Reference:
    """One golden file: the spec that describes it, parameters in our names and in theirs, and everything as stored."""

    spec: Spec
    params: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]


def load_reference(name: str) -> Reference:
    with safe_open(DATA / f"{name}.safetensors", framework="pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {key.removeprefix("state/"): value for key, value in tensors.items() if key.startswith("state/")}
    spec = _timaeus_spec(config) if name.startswith("timaeus") else _raventos_spec(config)
    kind = FORMATS[spec.model.architecture]
    params = decode_params(kind, spec, kind.write(state), name)
    return Reference(spec, params, state, tensors)


def _timaeus_spec(config: dict[str, Any]) -> Spec:
    return Spec(
        task=LinearTask(
            task_dim=config["task_size"],
            num_examples=config["max_examples"],
            num_tasks=config["num_tasks"],
            noise_variance=config["noise_variance"],
        ),
        model=Timaeus(
            num_layers=config["num_layers"],
            num_heads=config["num_heads"],
            embed_dim=config["embed_size"],
            mlp_dim=config["mlp_size"],
            layer_norm=config["layer_norm"],
            attention_output=config["include_output"],
        ),
        training=TrainingSpec(
            total_steps=config["total_steps"],
            batch_size=config["batch_size"],
            optimizer=Adam(),
            schedule=ScheduleSpec(name="one_cycle", learning_rate=config["max_lr"], warmup_fraction=0.5),
        ),
        seeds=SeedsSpec(),
    )


def _raventos_spec(config: dict[str, Any]) -> Spec:
    return Spec(
        task=LinearTask(
            task_dim=config["n_dims"],
            num_examples=config["n_points"],
            num_tasks=config["n_tasks"],
            noise_variance=config["noise_scale"] ** 2,
        ),
        model=Raventos(
            num_layers=config["n_layer"],
            num_heads=config["n_head"],
            embed_dim=config["n_embd"],
        ),
        training=TrainingSpec(
            total_steps=100,
            batch_size=config["batch_size"],
            schedule=ScheduleSpec(name="triangle", learning_rate=1e-3, warmup_fraction=0.5),
        ),
    )
