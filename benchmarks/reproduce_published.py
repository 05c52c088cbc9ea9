"""The first updates of a published training run, side by side with the five published seeds.

    python -m benchmarks.reproduce_published --steps 14000 --seed 0 --seed 1

Trains specs/hoogland-L2H4Minf.json (Hoogland et al. 2024) for the first N of its 500,000 updates and prints delta_ridge
on the pretraining distribution at each published step. delta_ridge is compared because most of the noise of a
particular evaluation set cancels in it. A published label s holds s + 1 updates.

When the loss falls depends on the initial parameters more than the five published runs, seeds 0 to 4, show: other
seeds come later. So each seed begins where the published run of that seed began, which PyTorch's CPU generator gives
again (tests/golden/test_published.py), with batches of ours; --init ours begins from `icl.core.model.init_params`.
"""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from tqdm import tqdm

from benchmarks.environment import add_save_option, describe_machine, report
from icl.backends import get_backend
from icl.core.backend import Tree
from icl.core.model import flatten_params, init_params
from icl.core.plan import plan_chunks
from icl.core.spec import SeedsSpec, Spec
from icl.core.step import build_eval, build_train, init_state
from icl.core.tasks import sample_batches
from icl.io.codec import load_spec
from icl.io.formats import FORMATS

ROOT = Path(__file__).parent.parent
METRIC = "pretrain/delta_ridge"
JUDGED = (3707, 4832, 7192, 10101, 13954)


def published(metric: str = METRIC) -> dict[int, dict[str, float]]:
    """Mean, standard deviation, least and largest of the five published seeds, by label."""
    with (ROOT / "tests" / "data" / "L2H4Minf_first_20k.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == metric]
    return {int(row["step"]): {key: float(row[key]) for key in ("mean", "std", "min", "max")} for row in rows}


def published_spec(seed: int) -> Spec:
    """The setting of the published runs."""
    spec = load_spec(ROOT / "specs" / "hoogland-L2H4Minf.json")
    return attrs.evolve(spec, seeds=SeedsSpec(init=seed, sampling=1000 + seed, evaluation=2000 + seed))


def published_params(spec: Spec, seed: int) -> Tree:
    """Where the published run of a seed began: the draws of `torch.nn.Linear` in the order of its code."""
    model: Any = spec.model
    embed = model.embed_dim
    params = {name: value for name, value in init_params(spec).items() if "layer_norm" in name}
    to_our_layout = {entry.ours: entry.restore for entry in FORMATS["timaeus"].entries(spec.model)}

    def draw(layer: str, num_inputs: int, num_outputs: int, *, bias: bool) -> None:
        for leaf, value in nn.Linear(num_inputs, num_outputs, bias=bias).named_parameters():
            name = f"{layer}.{leaf}"
            params[name] = to_our_layout[name](value.detach())

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draw("token_embedding", spec.task.task_dim + 1, embed, bias=False)
        draw("position_embedding", 2 * spec.task.num_examples, embed, bias=False)
        for layer in range(spec.model.num_layers):
            draw(f"blocks.{layer}.attention.qkv", embed, 3 * embed, bias=False)
            draw(f"blocks.{layer}.attention.output", embed, embed, bias=False)
            draw(f"blocks.{layer}.mlp.hidden", embed, model.mlp_dim, bias=True)
            draw(f"blocks.{layer}.mlp.output", model.mlp_dim, embed, bias=True)
        draw("unembedding", embed, spec.task.task_dim + 1, bias=True)
    return params


def measure(seed: int, labels: list[int], init: str) -> dict[int, float]:
    """Our delta_ridge at each published label for one seed."""
    spec, backend = published_spec(seed), get_backend("cpu")
    advance, evaluate = build_train(spec, backend, num_steps=spec.run.max_chunk), build_eval(spec, backend, None)
    initial = init_state(spec)
    if init == "published":
        initial["params"] = flatten_params(spec, published_params(spec, seed))
    state, step, found = backend.to_device(initial), 0, {}
    stops = [label + 1 for label in labels]
    with tqdm(total=stops[-1], desc=f"seed {seed}", file=sys.stderr, mininterval=10) as bar:
        for length in plan_chunks(0, stops, spec.run.max_chunk):
            state, _ = advance(
                state,
                backend.to_device(sample_batches(spec, range(step, step + length), None, spec.run.max_chunk)),
                length,
            )
            step += length
            bar.update(length)
            if step in stops:
                found[step - 1] = evaluate(state)[METRIC]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14_000, help="updates to run")
    parser.add_argument("--seed", type=int, action="append", help="may be given several times; default 0 and 1")
    parser.add_argument("--init", choices=("published", "ours"), default="published", help="the initial parameters")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_save_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    theirs = published()
    labels = [label for label in sorted(theirs) if label < options.steps]
    for seed in options.seed or [0, 1]:
        ours = measure(seed, labels, options.init)
        print(f"seed {seed}, {options.init} initial parameters")
        print(f"{'step':>6} {'ours':>8} {'mean':>8} {'std':>8} {'min':>8} {'max':>8}  within range +- std")
        inside = {}
        for label in labels:
            row = theirs[label]
            inside[label] = row["min"] - row["std"] <= ours[label] <= row["max"] + row["std"]
            numbers = " ".join(
                f"{value:8.4f}" for value in (ours[label], row["mean"], row["std"], row["min"], row["max"])
            )
            print(
                f"{label:>6} {numbers}  {'yes' if inside[label] else 'no'}{'' if label in JUDGED else ' (not judged)'}"
            )
        result = {
            "metric": METRIC,
            "seed": seed,
            "init": options.init,
            "steps": options.steps,
            "ours": {str(label): value for label, value in ours.items()},
            "judged_within": all(inside[label] for label in labels if label in JUDGED),
            **describe_machine(),
        }
        report(f"reproduce_published-{options.init}-seed{seed}", result, save=options.save)


if __name__ == "__main__":
    main()
