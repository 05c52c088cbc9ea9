"""The engine for a Ray cluster: one task for each run, one device for each task. All nodes share the store.

Ray decides where a task runs and starts it again when its node dies; whether a run that failed is tried again is
decided here, as on one machine.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from icl.attempt import Ending, ending_of_process
from icl.core.errors import BackendUnavailableError, SpecError
from icl.engines.devices import Device, default_kind
from icl.engines.pace import SavedPace
from icl.engines.run_queue import QueuedRun, count_statuses, steps_left
from icl.engines.training import SweepTraining
from icl.engines.worker import WorkerProcess
from icl.exit_codes import ExitCode
from icl.io.codec import spec_from_data, spec_to_data, with_run
from icl.io.location import resolve_location
from icl.io.states import RunState
from icl.stopping import handlers_kept

_REFRESH_SECONDS = 0.5
_RESOURCES: dict[str, dict[str, Any]] = {
    "cpu": {"num_cpus": 1},
    "cuda": {"num_cpus": 1, "num_gpus": 1},
    "tpu": {"num_cpus": 1, "resources": {"TPU": 1}},
}


def train_on_ray(
    training: SweepTraining, should_stop: Callable[[], bool], show: Callable[[dict[str, Any]], None]
) -> list[RunState]:
    """An `Engine`: every run is a task of a Ray cluster, which asks for one device of the kind `training.devices`.

    Without an address it is the cluster that RAY_ADDRESS names, or else one on this machine alone.
    """
    kind, grace_seconds = _kind(training), training.grace_seconds
    training.check_backends(kind)
    runs, pace = training.queue(), SavedPace()
    with _cluster(training.ray_address) as ray:
        train = ray.remote(**_RESOURCES[kind], max_retries=-1, max_calls=1)(_train)
        tasks: dict[Any, QueuedRun] = {}

        def submit(run: QueuedRun) -> None:
            asked = run.member.spec.run
            backend = Device(kind, "0").backend(asked.backend)
            spec = with_run(run.member.spec, backend=backend, store=resolve_location(asked.store))
            tasks[train.remote(spec_to_data(spec), kind, training.allow_backend_change, grace_seconds)] = run

        def collect() -> None:
            done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=_REFRESH_SECONDS)
            for task in done:
                run = tasks.pop(task)
                runs.record_ending(run, _ending(ray, task, run))
            states, now = runs.states(), time.monotonic()
            steps = sum(state.step for state in states)
            told = {"counts": count_statuses(states), "pace": pace.describe(now, steps, steps_left(states))}
            show({**told, "workers": []})

        while not should_stop() and any(run.is_open for run in runs.runs):
            while (run := runs.take_due("ray")) is not None:
                submit(run)
            if tasks:
                collect()
            else:
                time.sleep(_REFRESH_SECONDS)
        runs.stop()
        for task in tasks:
            ray.cancel(task)
        deadline = time.monotonic() + grace_seconds
        while tasks and time.monotonic() < deadline:
            collect()
    return runs.states()


def _kind(training: SweepTraining) -> str:
    given = training.devices or default_kind(training.backend)
    for kind in _RESOURCES:
        if kind == given:
            return kind
    raise SpecError(f"--devices: got {given!r}; expected cpu, cuda or tpu with --engine ray, one for each task.")


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster while inside."""
    try:
        import ray
    except ImportError as error:
        raise BackendUnavailableError(
            f"engine ray: got no ray ({error}); expected it. In the clone: pip install -e '.[ray]'."
        ) from None
    with handlers_kept():  # it has SIGTERM dump a stack
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def _train(spec: dict[str, Any], kind: str, allow_backend_change: bool, grace_seconds: float) -> dict[str, Any]:
    """A task: train one run in a process of its own, pinned to the device that Ray gave this one."""
    worker = WorkerProcess({**_device_here(kind).environment(), "ICL_WORKER": f"ray node {_context().get_node_id()}"})
    try:
        return attrs.asdict(worker.ask(spec_from_data(spec), allow_backend_change=allow_backend_change))
    finally:  # also when this task is cancelled
        worker.close(grace_seconds)


def _device_here(kind: str) -> Device:
    accelerator = {"cpu": "", "cuda": "GPU", "tpu": "TPU"}[kind]
    ids = _context().get_accelerator_ids().get(accelerator) or ["0"]
    return Device(kind, str(ids[0]))


def _context() -> Any:
    """What Ray knows of the task that this is."""
    import ray

    return ray.get_runtime_context()


def _ending(ray: Any, task: Any, run: QueuedRun) -> Ending:
    try:
        return Ending(**ray.get(task))
    except (ray.exceptions.RayError, KeyboardInterrupt):
        return ending_of_process(ExitCode.INCOMPLETE, run.member.name, run.member.spec.run.store)
