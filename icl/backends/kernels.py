"""A digest of what a device's kernels compute here: it tells what no name of a processor, library or variable does."""

import hashlib

import torch

from icl.core.architectures.raventos import Raventos
from icl.core.backend import Backend, Tree
from icl.core.families.linear import LinearTask
from icl.core.spec import ScheduleSpec, Spec, TrainingSpec
from icl.core.step import init_state, train_step
from icl.core.tasks import sample_batch

# One of each architecture and of each schedule that has kernels of its own, of the papers' sizes, so that libraries
# choose the kernels and divide the work among threads as they do in training.
_SPECS = (
    Spec(
        task=LinearTask(task_dim=4, num_examples=8),
        training=TrainingSpec(total_steps=16, batch_size=256),
    ),
    Spec(
        task=LinearTask(task_dim=8, num_examples=16),
        model=Raventos(num_layers=1, num_heads=2, embed_dim=128),
        training=TrainingSpec(
            total_steps=16, batch_size=64, schedule=ScheduleSpec(name="warmup_cosine", warmup_fraction=0.25)
        ),
    ),
)
_STEP = 7
_digests: dict[str, str] = {}


def kernels_digest(backend: Backend, setting: str) -> str:
    """32 bits over one training step of each architecture, and over whether numbers too small to be normal become zero.

    Runs of other bits have other digests, as far as two steps can tell. It takes as long as some steps, once a process
    and setting.

    Args:
        setting: what a process can choose of the backend that the kernels depend on, such as the number of threads.
    """
    key = f"{backend.name} {setting}"
    if key not in _digests:
        digest = hashlib.sha256()
        for spec in _SPECS:
            for name, leaf in sorted(_step(backend, spec).items()):
                digest.update(name.encode() + leaf.contiguous().numpy().tobytes())
        _digests[key] = digest.hexdigest()[:8]
    return _digests[key]


def _step(backend: Backend, spec: Spec) -> Tree:
    """What one update gives of moments that are zero and of numbers that are just normal."""
    state = init_state(spec)
    state |= {
        "step": torch.tensor(_STEP),
        "smallest": torch.full_like(state["params"], torch.finfo(torch.float32).tiny),
    }

    def step(state: Tree, batch: Tree) -> Tree:
        new, metrics = train_step(spec, state, batch)
        return {**new, **metrics, "halved": state["smallest"] / 2}

    compiled = backend.compile(step)
    return backend.to_cpu(compiled(backend.to_device(state), backend.to_device(sample_batch(spec, 0, None))))
