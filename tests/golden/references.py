"""The golden files in this package's names: made by running the two public reference implementations.

timaeus-research/icl at 5baf730 and mansheej/icl-task-diversity at 7c35803; the settings are in each file's metadata.
"""

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import safe_open

from icl.core.spec import ModelSpec, OptimizerSpec, ScheduleSpec, SeedsSpec, Spec, TaskSpec, TrainingSpec

DATA = Path(__file__).parent.parent / "data"
NAMES = ("timaeus-L2H4", "timaeus-L1H2-no-layernorm", "raventos-L2H2")


@attrs.frozen
class Reference:
    """One golden file: the spec that describes it, parameters in our names, and everything else as stored."""

    spec: Spec
    params: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]


def load_reference(name: str) -> Reference:
    with safe_open(DATA / f"{name}.safetensors", framework="pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {key.removeprefix("state/"): value for key, value in tensors.items() if key.startswith("state/")}
    if name.startswith("timaeus"):
        return Reference(_timaeus_spec(config), _timaeus_params(config, state), tensors)
    return Reference(_raventos_spec(config), _raventos_params(config, state), tensors)


def _timaeus_spec(config: dict[str, Any]) -> Spec:
    return Spec(
        task=TaskSpec(
            task_dim=config["task_size"],
            num_examples=config["max_examples"],
            num_tasks=config["num_tasks"],
            noise_variance=config["noise_variance"],
        ),
        model=ModelSpec(
            architecture="timaeus",
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
            optimizer=OptimizerSpec(),
            schedule=ScheduleSpec(name="one_cycle", learning_rate=config["max_lr"], warmup_fraction=0.5),
        ),
        seeds=SeedsSpec(),
    )


def _raventos_spec(config: dict[str, Any]) -> Spec:
    return Spec(
        task=TaskSpec(
            task_dim=config["n_dims"],
            num_examples=config["n_points"],
            num_tasks=config["n_tasks"],
            noise_variance=config["noise_scale"] ** 2,
        ),
        model=ModelSpec(
            architecture="raventos",
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


def _timaeus_params(config: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state = {key.removeprefix("token_sequence_transformer."): value for key, value in state.items()}
    heads, embed = config["num_heads"], config["embed_size"]
    params = {
        "token_embedding.weight": state["token_embedding.weight"],
        "position_embedding.weight": state["postn_embedding.weight"].T.contiguous(),
    }
    for layer in range(config["num_layers"]):
        block = f"blocks.{layer}"
        qkv = state[f"{block}.attention.attention.weight"].view(heads, 3, embed // heads, embed)
        params[f"{block}.attention.qkv.weight"] = qkv.transpose(0, 1).reshape(3 * embed, embed)
        if config["include_output"]:
            params[f"{block}.attention.output.weight"] = state[f"{block}.attention.output.weight"]
        for ours, theirs in (("mlp.hidden", "compute.0"), ("mlp.output", "compute.2")):
            params |= {f"{block}.{ours}.{leaf}": state[f"{block}.{theirs}.{leaf}"] for leaf in ("weight", "bias")}
        if config["layer_norm"]:
            for ours, index in (("attention_layer_norm", 0), ("mlp_layer_norm", 1)):
                for leaf in ("weight", "bias"):
                    params[f"{block}.{ours}.{leaf}"] = state[f"{block}.layer_norms.{index}.{leaf}"]
    head = "unembedding.1" if config["layer_norm"] else "unembedding"
    for leaf in ("weight", "bias"):
        params[f"unembedding.{leaf}"] = state[f"{head}.{leaf}"]
        if config["layer_norm"]:
            params[f"final_layer_norm.{leaf}"] = state[f"unembedding.0.{leaf}"]
    return params


def _raventos_params(config: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    params = {
        "token_embedding.weight": state["_in/kernel"].T.contiguous(),
        "position_embedding.weight": state["_h/wpe/embedding"],
        "unembedding.weight": state["_out/kernel"].T.contiguous(),
        "final_layer_norm.weight": state["_h/ln_f/scale"],
        "final_layer_norm.bias": state["_h/ln_f/bias"],
    }
    for layer in range(config["n_layer"]):
        for ours, theirs in (
            ("attention.qkv", "attn/c_attn"),
            ("attention.output", "attn/c_proj"),
            ("mlp.hidden", "mlp/c_fc"),
            ("mlp.output", "mlp/c_proj"),
        ):
            params[f"blocks.{layer}.{ours}.weight"] = state[f"_h/hs_{layer}/{theirs}/kernel"].T.contiguous()
            params[f"blocks.{layer}.{ours}.bias"] = state[f"_h/hs_{layer}/{theirs}/bias"]
        for ours, theirs in (("attention_layer_norm", "ln_1"), ("mlp_layer_norm", "ln_2")):
            params[f"blocks.{layer}.{ours}.weight"] = state[f"_h/hs_{layer}/{theirs}/scale"]
            params[f"blocks.{layer}.{ours}.bias"] = state[f"_h/hs_{layer}/{theirs}/bias"]
    return params
