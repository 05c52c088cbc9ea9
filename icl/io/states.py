"""Where each run of a sweep stands, from what is in its store alone."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from icl.core.plan import build_plan
from icl.core.spec import Spec
from icl.core.status import RunStatus
from icl.core.words import counted
from icl.io.errors import CheckpointError
from icl.io.manifest import Manifest, saved_steps
from icl.io.owner import Heartbeat, read_heartbeat
from icl.io.store import Store


@attrs.frozen
class RunState:
    """One run: pending (nothing saved), running, stopped (to be gone on with), failed or complete.

    `step` is the newest one it can be resumed from; `note` says where it runs or why it failed.
    """

    name: str
    status: RunStatus
    step: int
    total_steps: int
    note: str = ""


def run_states(
    store: Store, members: Iterable[tuple[str, Spec]], pause: Callable[[float], Any] = time.sleep
) -> list[RunState]:
    """The state of every run named, in that order.

    A run whose owner cannot be seen from here is looked at twice, two heartbeats apart, to tell living from dead.
    """
    members = list(members)
    present = set(store.list())
    looks = list(store.map(lambda member: _look(store, *member, member[0] in present), members))
    seen = {state.name: heartbeat for state, heartbeat in looks if heartbeat is not None}
    distant = {name: heartbeat for name, heartbeat in seen.items() if heartbeat.process == "unknown"}
    if distant:
        pause(2 * max(heartbeat.every for heartbeat in distant.values()))
    again = dict(zip(distant, store.map(lambda name: read_heartbeat(store, name), distant), strict=True))
    alive = {
        name: name not in again or (again[name].data != heartbeat.data and again[name].process != "ended")
        for name, heartbeat in seen.items()
    }
    return [
        attrs.evolve(state, status="running", note=f"on {seen[state.name].where}") if alive.get(state.name) else state
        for state, _ in looks
    ]


def _count_late(store: Store, name: str, spec: Spec) -> str:
    """What a complete run lacks of what its spec asks for, in words; empty when nothing."""
    missing = {*build_plan(spec).checkpoint} - {*saved_steps(store, name, "checkpoints")}
    late = [counted(len(missing), "checkpoint")] if missing else []
    # An attempt that completed has made every evaluation of its cadence.
    cadences = [half.evaluate_at for half, _ in Manifest(store, name).run_halves(spec) if half]
    if cadences and spec.run.evaluate_at not in cadences:
        late.append("evaluations")
    return " and ".join(late)


def _look(store: Store, name: str, spec: Spec, present: bool) -> tuple[RunState, Heartbeat | None]:
    """A run's state if nobody trains it, and who may."""
    total = spec.training.total_steps
    inside = set(store.list(name)) if present else set()
    if "spec.json" not in inside:
        return RunState(name, "pending", 0, total), None
    complete = "complete.json" in inside and Manifest(store, name).status() == "complete"
    step = total if complete else max(saved_steps(store, name, "state"), default=0)
    try:
        if complete:
            late = _count_late(store, name, spec)
            if not late:
                return RunState(name, "complete", total, total), None
            state = RunState(name, "stopped", total, total, f"{late} asked for since it was completed")
        else:
            error = Manifest(store, name).last_error()
            status: RunStatus = "failed" if error else "stopped" if step else "pending"
            state = RunState(name, status, step, total, error or "")
        heartbeat = read_heartbeat(store, name)
    except CheckpointError as unreadable:
        return RunState(name, "complete" if complete else "failed", step, total, str(unreadable)), None
    return state, None if heartbeat.process == "ended" else heartbeat
