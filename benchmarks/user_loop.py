"""The training loop a user would write with nn.Module, torch.optim.Adam and OneCycleLR: what ours is compared with."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from icl.core.backend import Tree
from icl.core.model import init_params
from icl.core.spec import Spec


class Attention(nn.Module):
    def __init__(self, embed: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(embed, 3 * embed, bias=bias)
        self.output = nn.Linear(embed, embed, bias=bias)

    def forward(self, carried: Tensor) -> Tensor:
        batch, tokens, embed = carried.shape
        parts = self.qkv(carried).view(batch, tokens, 3, self.heads, embed // self.heads).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind()
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, tokens, embed))
        return output


class MLP(nn.Module):
    def __init__(self, embed: int, hidden: int, gelu: bool) -> None:
        super().__init__()
        self.hidden = nn.Linear(embed, hidden)
        self.output = nn.Linear(hidden, embed)
        self.gelu = gelu

    def forward(self, carried: Tensor) -> Tensor:
        hidden = self.hidden(carried)
        output: Tensor = self.output(F.gelu(hidden, approximate="tanh") if self.gelu else hidden.relu())
        return output


class Block(nn.Module):
    def __init__(self, embed: int, heads: int, hidden: int, gpt2: bool) -> None:
        super().__init__()
        self.attention_layer_norm = nn.LayerNorm(embed)
        self.attention = Attention(embed, heads, bias=gpt2)
        self.mlp_layer_norm = nn.LayerNorm(embed)
        self.mlp = MLP(embed, hidden, gelu=gpt2)
        self.gpt2 = gpt2

    def forward(self, skip: Tensor) -> Tensor:
        carried = skip + self.attention(self.attention_layer_norm(skip))
        carried = carried + self.mlp(self.mlp_layer_norm(carried))
        output: Tensor = carried if self.gpt2 else skip + carried
        return output


class Transformer(nn.Module):
    """Both architectures of `icl.core.model`, batch first, with its parameter names and initial values."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        model: Any = spec.model
        dim, embed = spec.task.task_dim, model.embed_dim
        gpt2 = model.architecture == "raventos"
        self.token_embedding = nn.Linear(dim + 1, embed, bias=False)
        self.position_embedding = nn.Embedding(2 * spec.task.num_examples, embed)
        blocks = [Block(embed, model.num_heads, model.mlp_dim, gpt2) for _ in range(model.num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.final_layer_norm = nn.LayerNorm(embed)
        self.unembedding = nn.Linear(embed, 1 if gpt2 else dim + 1, bias=not gpt2)
        self.load_state_dict(init_params(spec))

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        batch, examples, dim = xs.shape
        tokens = torch.stack([F.pad(xs, (1, 0)), F.pad(ys, (0, dim))], dim=2).view(batch, 2 * examples, dim + 1)
        carried: Tensor = self.token_embedding(tokens) + self.position_embedding.weight
        for block in self.blocks:
            carried = block(carried)
        predictions: Tensor = self.unembedding(self.final_layer_norm(carried))[:, ::2, :1]
        return predictions


class UserLoop:
    """A model, its optimiser and its schedule; call with batches, get their losses.

    Raises: ValueError for a spec that this loop does not cover.
    """

    def __init__(self, spec: Spec, device: torch.device | str = "cpu") -> None:
        training = spec.training
        if training.schedule.name not in ("one_cycle", "triangle"):
            raise ValueError(f"user loop: got schedule {training.schedule.name!r}; expected one_cycle or triangle.")
        self.model = Transformer(spec).to(device)
        optimizer: Any = training.optimizer
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), training.schedule.learning_rate, optimizer.betas, optimizer.eps
        )
        divisor = training.total_steps / 2 - 1
        self.schedule: torch.optim.lr_scheduler.LRScheduler
        if training.schedule.name == "one_cycle":
            self.schedule = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizer,
                max_lr=training.schedule.learning_rate,
                total_steps=training.total_steps,
                pct_start=training.schedule.warmup_fraction,
                anneal_strategy="linear",
                div_factor=divisor,
                final_div_factor=divisor,
                cycle_momentum=False,
            )
        else:
            turn = round(training.schedule.warmup_fraction * training.total_steps)
            self.schedule = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda n: min(n / turn, (training.total_steps - n) / (training.total_steps - turn))
            )

    def step(self, batch: Tree) -> Tensor:
        """One update; returns the loss before it, still on the device."""
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(batch["xs"], batch["ys"]), batch["ys"])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def run(self, batches: Iterable[Tree]) -> list[float]:
        """`step` of each batch; returns the losses."""
        return [float(self.step(batch)) for batch in batches]
