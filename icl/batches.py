"""Training batches on the device, chunk by chunk, drawn beside training."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

import torch
from torch import Tensor

from icl.core.backend import Backend, Tree
from icl.core.spec import Experiment
from icl.core.tasks import sample_batch_on_device, sample_batches, training_seed


def batches_on_device(
    experiment: Experiment, backend: Backend, pool: Tensor | None, start: int, chunks: Sequence[int], num_rows: int
) -> Iterator[Tree]:
    """The batches of each chunk from step `start` on, `num_rows` rows each; the host samples one chunk ahead.

    Args:
        pool: `sample_task_pool(experiment)`.
        chunks: their lengths in steps.
    """
    firsts = accumulate(chunks, initial=start)
    ranges = [range(first, first + length) for first, length in zip(firsts, chunks, strict=False)]
    if experiment.training.sampling == "device":
        yield from _drawn_on_device(experiment, backend, pool, ranges, num_rows)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="icl-sampling") as executor:
        queued = deque[Future[Tree]]()
        for steps in ranges:
            queued.append(executor.submit(sample_batches, experiment, steps, pool, num_rows))
            if len(queued) > 1:
                yield backend.to_device(queued.popleft().result())
        for last in queued:
            yield backend.to_device(last.result())


def _drawn_on_device(
    experiment: Experiment, backend: Backend, pool: Tensor | None, ranges: list[range], num_rows: int
) -> Iterator[Tree]:
    generator = backend.manual_seed(0)
    on_device = backend.to_device({"pool": torch.empty(0) if pool is None else pool})
    draw = backend.compile(lambda tree: sample_batch_on_device(experiment, tree["pool"], generator))
    stack = backend.compile(lambda *batches: {key: torch.stack([b[key] for b in batches]) for key in batches[0]})
    for steps in ranges:
        drawn = []
        for step in steps:
            backend.manual_seed(training_seed(experiment, step))
            drawn.append(draw(on_device))
        yield stack(*drawn, *[drawn[-1]] * (num_rows - len(drawn)))
