"""What happens at the steps of a plan besides training: evaluating, saving, telling; and whether steps become slow."""

import logging
from functools import partial

import torch
from torch import Tensor

from icl.core.backend import Tree
from icl.core.errors import NonFiniteLossError
from icl.core.metrics import TRAINING_LOSS
from icl.core.model import unflatten_params
from icl.core.plan import build_plan
from icl.core.slowdown import Slowdown
from icl.profiling import Profiler
from icl.resume import Setup

logger = logging.getLogger("icl")
_LOWER = "Lower `training.schedule.learning_rate` or set `training.optimizer.max_grad_norm`."
_LOWER_SCALE = (  # the first loss is that of the initialisation, which no update has changed
    "Nothing was learnt before, so the numbers of the batch or of the initialisation are too large: lower what scales "
    "them, such as `task.noise_variance`."
)


class Effects:
    """What has been computed since the last saved state, and the effects due at a step."""

    def __init__(self, setup: Setup, profiler: Profiler, saved: int) -> None:
        plan = build_plan(setup.spec)
        self._checkpoint, self._evaluate = frozenset(plan.checkpoint), frozenset(plan.evaluate)
        self._save_state, self._log = frozenset(plan.save_state), frozenset(plan.log)
        self._setup, self._phase, self._saved = setup, profiler.phase, saved
        self._slowdown, self._profile, self._last_reading = Slowdown(), profiler.profile, (saved, 0.0)
        self._pending: list[tuple[Tensor, int]] = []
        self._losses: list[Tensor] = []
        self._rows: dict[int, dict[str, float]] = {}

    def add(self, metrics: Tree, length: int) -> None:
        """Keep the losses of a chunk of that length on the device until the next effect."""
        self._pending.append((metrics[TRAINING_LOSS], length))

    def visit(self, step: int, state: Tree, *, save_state: bool) -> None:
        """Do what the plan says happens at `step`; with `save_state`, save the state there in any case."""
        save_state = save_state or step in self._save_state
        setup, row = self._setup, dict[str, float]()
        if save_state or step in self._checkpoint or step in self._evaluate or step in self._log:
            with self._phase("train"):
                self._fetch_losses(step)
            self._watch_slowdown(step)
            if self._losses:
                row[TRAINING_LOSS] = float(self._losses[-1][-1])
        if step in self._evaluate:
            with self._phase("evaluate"):
                self._rows[step] = setup.measure(state, step)
            row |= self._rows[step]
        if step in self._checkpoint:
            with self._phase("save"):
                params = setup.backend.to_cpu({"params": state["params"]})["params"]
                _require_finite(params, step)
                named = unflatten_params(setup.spec, params)
                setup.writer.submit(
                    partial(setup.run.save_checkpoint, step, named, setup.metadata), params.nbytes, alone=False
                )
        if save_state and step > self._saved:
            with self._phase("save"):
                kept = setup.backend.to_cpu(state)
                _require_finite(kept["params"], step)
                num_bytes = sum(leaf.nbytes for leaf in kept.values())
                segment = (self._saved, step, torch.cat(self._losses), self._rows, setup.metadata)
                setup.writer.submit(partial(setup.run.save_segment, *segment), segment[2].nbytes)
                setup.writer.submit(partial(setup.run.save_state, step, kept, setup.metadata), num_bytes)
            self._saved, self._losses, self._rows = step, [], {}
        setup.progress(step, row)

    def _watch_slowdown(self, step: int) -> None:
        """Say once when steps have become many times slower than they were."""
        before, told = self._last_reading
        seconds = self._profile["train"]["wall_seconds"]
        self._last_reading = (step, seconds)
        slow = self._slowdown.add(step - before, seconds - told) if step > before else None
        if slow:
            logger.warning(
                "steps take %.3g ms, and took %.3g: something else uses this machine. If it uses the processor, stop "
                "and go on with OMP_WAIT_POLICY=PASSIVE in the environment before PyTorch is loaded, which keeps the "
                "bits, or train with `run.threads` 1, which does not. See docs/performance.md.",
                *(1e3 * each for each in slow),
            )

    def _fetch_losses(self, step: int) -> None:
        if not self._pending:
            return
        fetched = self._setup.backend.to_cpu({str(i): losses for i, (losses, _) in enumerate(self._pending)})
        losses = torch.cat([fetched[str(i)][:length] for i, (_, length) in enumerate(self._pending)])
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            first = int(bad[0])
            update = step - len(losses) + first + 1
            raise NonFiniteLossError(
                f"training loss: got {float(losses[first])} at update {update}; expected a finite number. "
                + (_LOWER if update > 1 else _LOWER_SCALE)
            )
        self._losses.append(losses)
        self._pending = []


def _require_finite(params: Tensor, step: int) -> None:
    if not bool(params.isfinite().all()):
        raise NonFiniteLossError(
            f"parameters after update {step}: got values that are not finite; expected finite ones. {_LOWER}"
        )
