"""The runs of a sweep as tasks of a Ray cluster, one device each. Results go through the store, which all nodes share.

Ray decides where a task runs and starts it again when its node dies; whether a run that failed is tried again is
decided here, as on one machine.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import attrs

from icl.attempt import Ending
from icl.core.errors import BackendUnavailableError
from icl.engines.devices import Device, Kind
from icl.engines.work import Job, Work, count_words
from icl.engines.worker import WorkerProcess
from icl.io.codec import spec_from_data, spec_to_data, with_run
from icl.io.place import place_of
from icl.stopping import handlers_kept

_REFRESH_SECONDS = 0.5
_ASKS: dict[Kind, dict[str, Any]] = {
    "cpu": {"num_cpus": 1},
    "cuda": {"num_cpus": 1, "num_gpus": 1},
    "tpu": {"num_cpus": 1, "resources": {"TPU": 1}},
}


def run_on_ray(
    work: Work,
    kind: Kind,
    *,
    address: str | None,
    should_stop: Callable[[], bool],
    grace_seconds: float,
    show: Callable[[dict[str, Any]], None],
    allow_backend_change: bool = False,
) -> None:
    """Train until nothing is left to do, or until asked to stop, every run saved.

    Args:
        kind: the device that each task asks Ray for, one of it.
        address: of the cluster; None for RAY_ADDRESS, and without that a cluster on this machine alone.
    """
    try:
        import ray
    except ImportError as error:
        raise BackendUnavailableError(
            f"engine ray: got no ray ({error}); expected it. In the clone: pip install -e '.[ray]'."
        ) from None
    with handlers_kept():  # it has SIGTERM dump a stack
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    try:
        train = ray.remote(**_ASKS[kind], max_retries=-1, max_calls=1)(_train)
        tasks: dict[Any, Job] = {}

        def collect(seconds: float) -> None:
            done, _ = ray.wait(list(tasks), num_returns=len(tasks), timeout=seconds) if tasks else ([], [])
            for task in done:
                work.settle(tasks.pop(task), _result_of(ray, task))
            show({"counts": count_words(work.states()), "workers": []})

        while not should_stop() and any(job.is_open for job in work.jobs):
            while (job := work.take_due("ray")) is not None:
                run = job.member.spec.run
                backend = Device(kind, "0").backend(run.backend)
                spec = with_run(job.member.spec, backend=backend, store=place_of(run.store))
                tasks[train.remote(spec_to_data(spec), kind, allow_backend_change, grace_seconds)] = job
            if tasks:
                collect(_REFRESH_SECONDS)
            else:
                time.sleep(_REFRESH_SECONDS)
        work.stop()
        for task in tasks:
            ray.cancel(task)
        deadline = time.monotonic() + grace_seconds
        while tasks and time.monotonic() < deadline:
            collect(_REFRESH_SECONDS)
    finally:
        ray.shutdown()


def _train(spec: dict[str, Any], kind: Kind, allow_backend_change: bool, grace_seconds: float) -> dict[str, Any] | int:
    """A task: train one run in a process of its own, pinned to the device that Ray gave this one."""
    worker = WorkerProcess({**_device_here(kind).environment(), "ICL_WORKER": f"ray node {_context().get_node_id()}"})
    try:
        result = worker.ask(spec_from_data(spec), allow_backend_change=allow_backend_change)
    finally:  # also when this task is cancelled
        worker.close(grace_seconds)
    return attrs.asdict(result) if isinstance(result, Ending) else result


def _device_here(kind: Kind) -> Device:
    accelerator = {"cpu": "", "cuda": "GPU", "tpu": "TPU"}[kind]
    ids = _context().get_accelerator_ids().get(accelerator) or ["0"]
    return Device(kind, str(ids[0]))


def _context() -> Any:
    """What Ray knows of the task that this is."""
    import ray

    return ray.get_runtime_context()


def _result_of(ray: Any, task: Any) -> Ending | int:
    try:
        result = ray.get(task)
    except (ray.exceptions.RayError, KeyboardInterrupt):
        return 1
    return Ending(**result) if isinstance(result, dict) else int(result)
