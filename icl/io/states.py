"""Where each run of a sweep stands, from what is in its store alone."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import attrs

from icl.core.spec import Spec
from icl.io.manifest import Manifest, saved_steps
from icl.io.owner import Sighting, sight
from icl.io.store import Store

Word = Literal["pending", "running", "stopped", "failed", "complete"]


@attrs.frozen
class RunState:
    """One run: pending (nothing saved), running, stopped (to be gone on with), failed or complete.

    `step` is the newest one it can be resumed from; `note` says where it runs or why it failed.
    """

    name: str
    word: Word
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
    seen = {state.name: sighting for state, sighting in looks if sighting is not None}
    distant = {name: sighting for name, sighting in seen.items() if sighting.process == "unknown"}
    if distant:
        pause(2 * max(sighting.every for sighting in distant.values()))
    again = dict(zip(distant, store.map(lambda name: sight(store, name), distant), strict=True))
    alive = {
        name: name not in again or (again[name].data != sighting.data and again[name].process != "ended")
        for name, sighting in seen.items()
    }
    return [
        attrs.evolve(state, word="running", note=f"on {seen[state.name].where}") if alive.get(state.name) else state
        for state, _ in looks
    ]


def _look(store: Store, name: str, spec: Spec, present: bool) -> tuple[RunState, Sighting | None]:
    """A run's state if nobody trains it, and who may."""
    total = spec.training.total_steps
    inside = set(store.list(name)) if present else set()
    if "complete.json" in inside:
        return RunState(name, "complete", total, total), None
    if "spec.json" not in inside:
        return RunState(name, "pending", 0, total), None
    step = max(saved_steps(store, name, "state"), default=0)
    error = Manifest(store, name).last_error()
    word: Word = "failed" if error else "stopped" if step else "pending"
    sighting = sight(store, name)
    return RunState(name, word, step, total, error or ""), None if sighting.process == "ended" else sighting
