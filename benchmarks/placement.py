"""What belongs on the host and what on the device, on XLA, and which attention: numbers behind decision 0009.

    PJRT_DEVICE=CPU python -m benchmarks.placement [--save]

Host time is the main thread's processor time; wall time ends when the device is done; both in milliseconds a call,
after the first. The last part trains a step on one device and on four (CPU_NUM_DEVICES=4 imitates a TPU VM's chips).
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import add_save_option, describe_machine, print_table, report
from icl.backends import get_backend
from icl.core.backend import Backend, Tree
from icl.core.baselines import dmmse_predictions
from icl.core.model import parameter_shapes
from icl.core.spec import Spec, with_fields
from icl.core.step import build_eval, init_state, train_step
from icl.core.tasks import (
    sample_batch,
    sample_batch_on_device,
    sample_batches,
    sample_evaluation_batch,
    sample_task_pool,
)
from icl.io.codec import load_spec

ROOT = Path(__file__).parent.parent


def measure(name: str, call: Callable[[], object], backend: Backend, times: int = 10) -> dict[str, Any]:
    """One row: what the first call compiled, and what the others cost."""
    before = backend.counters().get("compile_seconds", 0.0)
    call()
    backend.synchronize()
    compiled = backend.counters().get("compile_seconds", 0.0) - before
    wall, host = perf_counter(), thread_time()
    for _ in range(times):
        call()
    host = thread_time() - host
    backend.synchronize()
    wall = perf_counter() - wall
    return {"what": name, "host_ms": 1e3 * host / times, "wall_ms": 1e3 * wall / times, "compile_s": compiled}


def measure_places(spec: Spec, backend: Backend, log2_tasks: int) -> list[dict[str, Any]]:
    """Initialisation, sampling, dMMSE and evaluation, each on the host and on the device."""
    cpu, steps = get_backend("cpu"), range(16)
    pooled = with_fields(spec, "task", num_tasks=2**log2_tasks)
    pool = sample_task_pool(pooled)
    assert pool is not None
    there = backend.to_device({"pool": torch.empty(0)})
    generator = backend.manual_seed(0)
    draw = backend.compile(lambda tree: sample_batch_on_device(spec, tree["pool"], generator))
    batch = sample_evaluation_batch(pooled, "pretrain", pool)
    batch = {"xs": batch["xs"][:512], "ys": batch["ys"][:512], "pool": pool}
    task = spec.task
    batch_there = backend.to_device(batch)
    device = batch_there["xs"].device
    sizes = {key: leaf.shape for key, leaf in init_state(spec).items()}
    init = backend.compile(lambda tree: {key: torch.randn(size, device=device) for key, size in sizes.items()})
    dmmse = backend.compile(lambda t: {"y": dmmse_predictions(t["xs"], t["ys"], t["pool"], task.noise_variance)})
    states = {name: b.to_device(init_state(spec)) for name, b in (("host", cpu), ("device", backend))}
    evaluations = {"host": build_eval(spec, cpu, None), "device": build_eval(spec, backend, None)}

    def sample_there() -> None:
        for step in steps:
            backend.manual_seed(step)
            draw(there)

    def evaluate_on_the_host() -> object:
        return evaluations["host"](backend.to_cpu(states["device"]))

    return [
        measure("initialisation, host", lambda: backend.to_device(init_state(spec)), backend),
        measure("initialisation, device", lambda: init(there), backend),
        measure("16 batches, host", lambda: backend.to_device(sample_batches(spec, steps, None)), backend),
        measure("16 batches, device", sample_there, backend),
        measure(
            f"dMMSE of 2^{log2_tasks} tasks, host",
            lambda: dmmse_predictions(**batch, noise_variance=task.noise_variance),
            backend,
            2,
        ),
        measure(f"dMMSE of 2^{log2_tasks} tasks, device", lambda: dmmse(batch_there), backend, 2),
        measure("evaluation, host", evaluate_on_the_host, backend),
        measure("evaluation, device", lambda: evaluations["device"](states["device"]), backend),
    ]


def attentions(mask: Tensor) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Ways to write causal attention of (B*H, T, E/H) tensors; `mask` is additive (T, T)."""
    scale, allowed = 0.25, mask == 0

    def additive(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale).softmax(-1) @ values

    def where(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = queries @ keys.transpose(1, 2) * scale
        return torch.where(allowed, scores, -torch.inf).softmax(-1) @ values

    def sdpa(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)

    def slices(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = []
        for t in range(queries.shape[1]):
            scores = queries[:, t : t + 1] @ keys[:, : t + 1].transpose(1, 2) * scale
            rows.append(scores.softmax(-1) @ values[:, : t + 1])
        return torch.cat(rows, dim=1)

    return {"additive mask": additive, "where": where, "scaled_dot_product_attention": sdpa, "slices": slices}


def measure_attentions(spec: Spec, backend: Backend) -> list[dict[str, Any]]:
    """Forward and backward of the attention of one layer."""
    tokens, heads = 2 * spec.task.num_examples - 1, spec.model.num_heads
    shape = (spec.training.batch_size * heads, tokens, parameter_shapes(spec)["token_embedding.weight"][0] // heads)
    generator = torch.Generator().manual_seed(0)
    inputs = backend.to_device({key: torch.randn(shape, generator=generator) for key in ("q", "k", "v")})
    mask = backend.to_device({"m": torch.full((tokens, tokens), -torch.inf).triu(1)})["m"]
    rows = []
    results = []
    for name, attend in attentions(mask).items():

        def gradients(tree: Tree, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend) -> Tree:
            with torch.set_grad_enabled(True):
                leaves = [leaf.detach().requires_grad_() for leaf in tree.values()]
                grads = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
            return dict(zip(tree, grads, strict=True))

        compiled = backend.compile(gradients)
        rows.append(measure(f"attention, {name}", partial(compiled, inputs), backend))
        results.append(backend.to_cpu(compiled(inputs))["q"])
    assert all(torch.allclose(result, results[0], atol=1e-3) for result in results)  # the same function of float32
    return rows


def measure_split(spec: Spec, num_devices: int) -> dict[str, Any]:
    """One training step with its batch split over the devices of this process; parameters on each."""
    import numpy as np
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    if num_devices > 1:
        xr.use_spmd()
    backend = get_backend("xla")
    state, batch = backend.to_device(init_state(spec)), backend.to_device(sample_batch(spec, 0, None))
    if num_devices > 1:
        mesh = xs.Mesh(np.arange(num_devices), (num_devices,), ("data",))
        for leaf in batch.values():
            xs.mark_sharding(leaf, mesh, ("data", None, None))
    step = backend.compile(lambda s, b: train_step(spec, s, b)[0])

    def call() -> None:
        nonlocal state
        state = step(state, batch)

    row = measure(f"a step on {num_devices} of {xr.global_runtime_device_count()} devices", call, backend, 20)
    xm.wait_device_ops()
    torch_xla.sync()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default=str(ROOT / "specs" / "hoogland-L2H4Minf.json"))
    parser.add_argument("--log2-tasks", type=int, default=12, help="the size of the pool for dMMSE")
    parser.add_argument("--split", type=int, help=argparse.SUPPRESS)
    add_save_option(parser)
    options = parser.parse_args()
    if options.split is not None:
        print(json.dumps(measure_split(load_spec(options.spec), options.split)))
        return
    spec, backend = load_spec(options.spec), get_backend("xla")
    rows = measure_places(spec, backend, options.log2_tasks) + measure_attentions(spec, backend)
    for num_devices in (1, 4):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.placement", "--spec", options.spec, "--split", str(num_devices)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "CPU_NUM_DEVICES": str(num_devices)},
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print_table(rows)
    report("placement", {"rows": rows, "backend": backend.describe(), **describe_machine()}, save=options.save)


if __name__ == "__main__":
    main()
