"""Metrics mirrored to W&B, on a thread of its own. Nothing that happens there stops training: our own are the record.

A run's W&B id is its name, so that a resumed run goes on in the same one; under a W&B sweep agent it is the id that the
agent was given. What W&B lacks after an interruption is brought from the store, and what it has is not sent again.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from icl import __version__
from icl.core.plan import build_plan
from icl.core.spec import Spec, WandbSpec
from icl.io.codec import spec_to_data
from icl.io.rundir import Rows

logger = logging.getLogger("icl")
STEP = "step"
_CAPACITY = 10_000  # rows that may wait; beyond, W&B is taken to be away
_INIT_SECONDS, _LOGIN_SECONDS = 25.0, 1.0
_COMPLETE_SECONDS, _CUT_SHORT_SECONDS = 30.0, 3.0  # for W&B to take what is left; a signal's grace is 8 s
Row = Mapping[str, float]


class Silence:
    """What a run without W&B logs to."""

    status = "failed"
    url = None

    def log(self, step: int, row: Row) -> None:
        """Do nothing."""


class Mirror:
    """One attempt at a run, as W&B sees it; `status` says how it is about to end, `url` where W&B shows it.

    Args:
        name: the run's; its W&B id and display name.
        config: what W&B shows as the run's configuration.
        start: the step that the attempt goes on from.
        steps: those whose rows are mirrored.
        saved_rows: reads the rows up to `start` from the store; called only when W&B lacks some.
    """

    def __init__(
        self,
        wandb: WandbSpec,
        name: str,
        config: Mapping[str, Any],
        start: int,
        steps: Collection[int],
        saved_rows: Callable[[], Rows],
    ) -> None:
        self._wandb, self._name, self._config = wandb, name, config
        self._start, self._steps, self._saved_rows = start, steps, saved_rows
        self._rows = queue.Queue[tuple[int, Row] | None](_CAPACITY)
        self._away = False
        self.status = "failed"
        self.url: str | None = None
        self._thread = threading.Thread(target=self._work, name="icl-wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, row: Row) -> None:
        """Mirror a row, unless it was computed by an attempt before this one; never waits."""
        if self._away or step not in self._steps or (step <= self._start and self._start > 0):
            return
        try:
            self._rows.put_nowait((step, row))
        except queue.Full:
            self._give_up(f"got {_CAPACITY} rows that it has not taken")

    def close(self) -> None:
        """Tell W&B how the attempt ended, and wait a while for it to take everything."""
        seconds = _COMPLETE_SECONDS if self.status == "complete" else _CUT_SHORT_SECONDS
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._give_up(f"got no end within {seconds:g} s")

    def _work(self) -> None:
        try:
            run = self._begin()
            last = int(run.summary.get(STEP, -1)) if run.resumed else -1
            if self._start > last and self._start > 0:
                for step, row in self._saved_rows().items():
                    if last < step <= self._start and step in self._steps:
                        run.log({STEP: step, **row})
            while (given := self._rows.get()) is not None:
                if given[0] > last:
                    run.log({STEP: given[0], **given[1]})
            if self.status == "interrupted":
                run.mark_preempting()
            run.finish(exit_code=0 if self.status == "complete" else 1)
        except Exception as error:
            self._give_up(f"got {type(error).__name__}: {str(error).strip()}")

    def _begin(self) -> Any:
        import wandb

        swept = "WANDB_SWEEP_ID" in os.environ  # then project and id are the sweep's
        run: Any = wandb.init(
            project=None if swept else self._wandb.project,
            entity=None if swept else self._wandb.entity,
            id=None if swept else self._name,
            name=self._name,
            group=self._wandb.group,
            mode="offline" if self._wandb.mode == "offline" else None,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                finish_timeout=_COMPLETE_SECONDS,
                init_timeout=_INIT_SECONDS,
                login_timeout=_LOGIN_SECONDS,
                silent=True,
            ),
        )
        self.url = run.url
        run.config.update(dict(self._config), allow_val_change=True)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def _give_up(self, what: str) -> None:
        if not self._away:
            logger.warning(
                "W&B: %s; training goes on without it. The metrics are in the store, and what W&B lacks is sent by the "
                "next attempt.",
                what,
            )
        self._away = True


@contextmanager
def mirrored(spec: Spec, name: str, start: int, saved_rows: Callable[[], Rows]) -> Iterator[Mirror | Silence]:
    """Where an attempt's rows go besides the store, while inside; what is set as `status` is told at the end."""
    if spec.run.wandb is None:
        yield Silence()
        return
    plan = build_plan(spec)
    config = {**spec_to_data(spec), "icl": {"run": name, "store": spec.run.store, "version": __version__}}
    mirror = Mirror(spec.run.wandb, name, config, start, {*plan.log, *plan.evaluate}, saved_rows)
    try:
        yield mirror
    finally:
        mirror.close()


def describe_wandb(spec: Spec, name: str) -> dict[str, Any] | None:
    """The W&B run of an attempt, for its manifest."""
    wandb, swept = spec.run.wandb, os.environ.get("WANDB_SWEEP_ID")
    if wandb is None:
        return None
    return {
        "entity": os.environ.get("WANDB_ENTITY") if swept else wandb.entity,
        "project": os.environ.get("WANDB_PROJECT") if swept else wandb.project,
        "id": os.environ.get("WANDB_RUN_ID") if swept else name,
        "sweep": swept,
        "mode": wandb.mode,
    }
