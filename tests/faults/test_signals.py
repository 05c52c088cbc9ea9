"""SIGTERM and SIGINT at any moment (field fault 44): out within the grace period, nothing torn, right afterwards."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from icl.io.codec import spec_from_data
from icl.io.names import run_name
from tests.emulator import BUCKET, Proxy, Request
from tests.faults.runs import SPEC, Process, finish, start, verify, wait_until, write_spec
from tests.readers import stderr_that_nobody_reads

ONE_REQUEST = 2.0  # seconds, in which signals are one request
GRACE = 2.0  # seconds
BIG = {"task_dim": 8, "num_examples": 16}


def out(process: Process, moment: Callable[[], bool], number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    """Send a signal when `moment()` has come; the exit code and stdout of the process, whose word says why it left."""
    assert wait_until(moment, process)
    process.send_signal(number)
    return finish(process)


@pytest.mark.parametrize(
    ("moment", "number", "changes"),
    [
        # The training program takes longer to compile than the grace period.
        (
            "compilation",
            signal.SIGTERM,
            {"model": {"num_layers": 8, "num_heads": 2, "embed_dim": 64}, "run": {"backend": "xla"}},
        ),
        # dMMSE over 2^17 tasks for as many sequences takes half a minute, before the first step.
        ("evaluation", signal.SIGINT, {"task": {**BIG, "num_tasks": 2**17}, "evaluation": {"batch_size": 1024}}),
        # One chunk of batches of 2^18 sequences takes longer to draw, and to train on.
        (
            "sampling",
            signal.SIGTERM,
            {"task": BIG, "training": {"total_steps": 64, "batch_size": 2**18}, "run": {"max_chunk": 4}},
        ),
    ],
    ids=["compilation", "evaluation", "sampling"],
)
def test_what_takes_longer_than_the_grace_period_is_left(
    tmp_path: Path, moment: str, number: signal.Signals, changes: dict[str, Any]
) -> None:
    data = {**SPEC, **changes, "run": {**SPEC["run"], **changes.get("run", {}), "grace_seconds": GRACE}}
    run = tmp_path / "store" / run_name(spec_from_data(data))
    begun = run / ("attempts" if moment == "evaluation" else "checkpoints")
    process = start(write_spec(tmp_path / "spec.json", data), tmp_path / "store", tmp_path / "log")
    code, stdout = out(process, lambda: begun.is_dir() and any(begun.glob("[!.]*")), number)
    told = (tmp_path / "log").read_text()
    assert (code, stdout) == (75, ""), told
    assert f"no chunk ended and was saved within {GRACE:g} s: leaving" in told
    assert "Traceback" not in told
    assert verify(tmp_path / "store").returncode == 0


def test_an_upload_that_hangs_is_left(tmp_path: Path, gcs_proxy: Proxy) -> None:
    hanging: list[Request] = []

    def hang(request: Request) -> str | None:
        if request.call == "create" and "/upload/" in request.path and len(gcs_proxy.requests) > 12:
            hanging.append(request)
            return "stall"
        return None

    gcs_proxy.fault = hang
    data = {**SPEC, "run": {**SPEC["run"], "grace_seconds": GRACE}}
    url = f"gs://{BUCKET}/{tmp_path.name}"
    process = start(write_spec(tmp_path / "spec.json", data), url, tmp_path / "log")
    code, stdout = out(process, lambda: bool(hanging))
    assert (code, stdout) == (75, ""), (tmp_path / "log").read_text()
    gcs_proxy.fault = lambda request: None
    assert verify(url).returncode == 0
    code, stdout = finish(start(tmp_path / "spec.json", url, tmp_path / "log"))
    assert (code, json.loads(stdout)["status"]) == (0, "complete")
    assert verify(url).returncode == 0


def test_a_second_signal_that_comes_clearly_later_leaves_at_once(tmp_path: Path) -> None:
    # A chunk of some ten trillion operations, which no processor ends within the two seconds that are waited.
    model = {"num_layers": 4, "num_heads": 4, "embed_dim": 256}
    training = {"total_steps": 64, "batch_size": 2048}
    run_half = {"grace_seconds": 600, "max_chunk": 64, "checkpoint_at": {}, "evaluate_at": {}}
    data = {**SPEC, "model": model, "training": training, "run": run_half}
    run = tmp_path / "store" / run_name(spec_from_data(data))
    process = start(write_spec(tmp_path / "spec.json", data), tmp_path / "store", tmp_path / "log")
    assert wait_until(lambda: (run / "checkpoints").is_dir(), process)
    process.send_signal(signal.SIGINT)
    assert wait_until(lambda: "saving at the end of this chunk" in (tmp_path / "log").read_text(), process)
    time.sleep(ONE_REQUEST)  # since the first was answered: the only way to be later
    code, stdout = out(process, lambda: True, signal.SIGTERM)
    assert (code, stdout) == (128 + signal.SIGTERM, "")
    assert "SIGTERM again: leaving" in (tmp_path / "log").read_text()
    assert verify(tmp_path / "store").returncode == 0


@pytest.mark.parametrize("reader", ["gone", "asleep", "no stderr", "full"])
def test_a_stderr_that_nobody_reads_loses_no_run(tmp_path: Path, reader: str) -> None:
    """A closed terminal, a dead pipe, one whose reader sleeps: it trains on, and SIGTERM saves."""
    data = {**SPEC, "training": {"total_steps": 2**24, "batch_size": 8}}
    command = [sys.executable, "-m", "icl.run", str(write_spec(tmp_path / "spec.json", data))]
    store = tmp_path / "store"
    run = store / run_name(spec_from_data(data))
    with (
        stderr_that_nobody_reads(reader) as stderr,
        subprocess.Popen(
            [*stderr.shell, *command, "--store", str(store)], stdout=subprocess.PIPE, stderr=stderr.fd, text=True
        ) as process,
    ):
        assert wait_until(lambda: len(list(run.glob("state/step-*"))) >= 2, process)
        process.send_signal(signal.SIGTERM)
        code, stdout = finish(process)
    assert code == 75
    assert json.loads(stdout)["status"] == "interrupted"
    assert (run / "state" / f"step-{json.loads(stdout)['step']:012d}.safetensors").exists()


HUNG = """
import sys, threading
from icl import member, run
build_train = member.build_train

def hang_in_the_third(spec, backend, *, num_steps):
    advance, calls = build_train(spec, backend, num_steps=num_steps), []
    def call(*arguments):
        calls.append(1)
        if len(calls) == 3:
            threading.Event().wait()
        return advance(*arguments)
    return call

member.build_train = hang_in_the_third
sys.exit(run.main(sys.argv[1:]))
"""


def test_a_device_that_never_answers_is_left(tmp_path: Path) -> None:
    """Field fault 48: a stub device call that never returns, and no signal."""
    spec = write_spec(tmp_path / "spec.json", {**SPEC, "run": {**SPEC["run"], "watchdog_seconds": GRACE}})
    command = [sys.executable, "-c", HUNG, str(spec), "--store", str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (75, ""), ended.stderr
    assert f"nothing has ended in {GRACE:g} s: leaving; run again to go on" in ended.stderr
    assert verify(tmp_path / "store").returncode == 0


def test_the_quickstart_saves_its_state_within_the_default_grace_period(tmp_path: Path) -> None:
    quickstart = Path(__file__).parents[2] / "specs" / "quickstart.json"
    name = run_name(spec_from_data(json.loads(quickstart.read_text())))
    process = start(quickstart, tmp_path / "store", tmp_path / "log")
    later = tmp_path / "store" / name / "checkpoints" / "step-000000000009.safetensors"
    code, stdout = out(process, later.exists)
    assert code == 75
    ended = json.loads(stdout)
    assert ended["status"] == "interrupted"
    assert (tmp_path / "store" / name / "state" / f"step-{ended['step']:012d}.safetensors").exists()
    assert verify(tmp_path / "store").returncode == 0
