"""Real processes: killed, stopped, doubled, and given damaged files; the bits stay those of an unbroken run."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from icl.io.codec import spec_from_data
from icl.io.names import run_name
from tests.emulator import Emulator, emulator
from tests.faults.campaign import SERVER, campaign
from tests.faults.crowd import crowd
from tests.faults.runs import (
    SPEC,
    Saved,
    differences,
    finish,
    read_saved,
    start,
    verify,
    wait_until,
    write_spec,
)

TOTAL = SPEC["training"]["total_steps"]
NAME = run_name(spec_from_data(SPEC))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of an unbroken run."""
    folder = tmp_path_factory.mktemp("unbroken")
    code, stdout = finish(start(write_spec(folder / "spec.json", SPEC), folder / "store", folder / "log"))
    assert code == 0, (folder / "log").read_text()
    assert json.loads(stdout)["status"] == "complete"
    return folder / "store"


@pytest.fixture(scope="module")
def reference(unbroken: Path) -> Saved:
    return read_saved(unbroken)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return write_spec(tmp_path / "spec.json", SPEC)


def states(store: Path) -> list[Path]:
    return sorted((store / NAME / "state").glob("step-*"))


def interrupt(spec: Path, store: Path, log: Path, number: signal.Signals) -> tuple[int, dict[str, Any]]:
    """Start a run and send it a signal when it has saved its third state; its exit code and JSON line."""
    process = start(spec, store, log)
    assert wait_until(lambda: bool(states(store)) and states(store)[-1].name >= "step-000000000009", process)
    process.send_signal(number)
    code, stdout = finish(process)
    (line,) = stdout.splitlines()
    return code, json.loads(line)


def flip_a_byte(path: Path) -> None:
    """In the last tensor of the file."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_a_short_kill_campaign(tmp_path: Path) -> None:
    """Field fault 45: `python -m tests.faults.campaign` is the long one."""
    result = campaign(tmp_path, kills=3, seed=int.from_bytes(os.urandom(4), "little"))
    assert result.faults == []
    assert result.kills.total() == 3
    assert result.equal == result.runs


def test_a_short_kill_campaign_on_object_storage(tmp_path: Path, gcs: Emulator) -> None:
    """The trainer and the server are killed, each on its own."""
    with emulator(tmp_path) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        seed = int.from_bytes(os.urandom(4), "little")
        result = campaign(tmp_path, kills=2, seed=seed, server=server, server_kills=2)
    assert result.faults == []
    assert (result.kills.total(), result.kills[SERVER]) == (4, 2)
    assert result.equal == result.runs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_saves_and_goes_on(number: signal.Signals, spec: Path, tmp_path: Path, reference: Saved) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    code, line = interrupt(spec, store, log, number)
    assert code == 75
    assert line == {"run": NAME, "store": str(store), "step": line["step"], "status": "interrupted"}
    assert 0 < line["step"] < TOTAL
    assert states(store)[-1].name == f"step-{line['step']:012d}.safetensors"
    assert f"{number.name}: saving" in log.read_text()
    code, stdout = finish(start(spec, store, log))
    assert (code, json.loads(stdout)["status"]) == (0, "complete")
    assert f"resuming {NAME} from step {line['step']}" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert differences(reference, read_saved(store)) == []


@pytest.mark.parametrize(
    ("processes", "heartbeat", "place"), [(2, True, "local"), (8, False, "local"), (8, True, "gcs")], ids=str
)
def test_a_crowd_has_one_result(
    tmp_path: Path, reference: Saved, gcs: Emulator, processes: int, heartbeat: bool, place: str
) -> None:
    """Fault 55: `python -m tests.faults.crowd` tries more of them."""
    server = gcs if place == "gcs" else None
    result = crowd(tmp_path, processes, heartbeat=heartbeat, reference=reference, server=server)
    assert result.faults == [], result.line()


# Both look for a state before either has saved one; left to themselves one may be a second behind the other.
BEGIN_TOGETHER = """
import sys, time
from pathlib import Path
import icl.member
from icl.run import main

look = icl.member.state_to_go_on_from
def together(*arguments):
    state = look(*arguments)
    here = Path(sys.argv[1])
    (here.parent / f"{here.name}.found-nothing").touch()
    while len([*here.parent.glob("*.found-nothing")]) < 2:
        time.sleep(0.01)
    return state
icl.member.state_to_go_on_from = together
sys.exit(main(sys.argv[2:]))
"""


def begin_together(spec: Path, store: Path, log: Path, threads: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BEGIN_TOGETHER, str(log), str(spec), "--store", str(store)]
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with log.open("w") as stderr:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)


def test_a_writer_of_other_bits_is_stopped(tmp_path: Path) -> None:
    """Two numbers of threads round differently; with no heartbeat to keep them apart, the first to publish stays."""
    data = {
        "task": {"task_dim": 4, "num_examples": 8},
        "training": {"total_steps": 40, "batch_size": 256},
        "run": {"heartbeat_seconds": None, "checkpoint_at": {"linear": 41}, "evaluate_at": {}, "save_state_every": 5},
    }
    spec = write_spec(tmp_path / "spec.json", data)
    logs = {threads: tmp_path / f"{threads}.log" for threads in ("1", "2")}
    started = {threads: begin_together(spec, tmp_path / "store", log, threads) for threads, log in logs.items()}
    ends = {threads: finish(process)[0] for threads, process in started.items()}
    assert sorted(ends.values()) == [0, 4], ends
    (loser,) = (threads for threads, code in ends.items() if code == 4)
    told = logs[loser].read_text()
    assert re.search(r"step-\d{12}\.safetensors: got tensors with SHA-256 [0-9a-f]{64} from .*threads", told), told
    assert re.search(r"expected [0-9a-f]{64}, published before from .*threads.*The first stays", told), told
    assert "Traceback" not in told
    assert verify(tmp_path / "store").returncode == 0


def test_verify_names_a_damaged_checkpoint(unbroken: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(unbroken, store)
    assert verify(store).returncode == 0
    flip_a_byte(store / NAME / "checkpoints" / "step-000000000010.safetensors")
    result = verify(store)
    assert result.returncode == 4
    assert f"{NAME}/checkpoints/step-000000000010.safetensors: got" in result.stdout
    assert ": 1 fault\n" in result.stdout
    assert "Traceback" not in result.stderr


def test_a_damaged_newest_state_is_passed_over(spec: Path, tmp_path: Path, reference: Saved) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    interrupt(spec, store, log, signal.SIGTERM)
    before, newest = states(store)[-2:]
    flip_a_byte(newest)
    code, stdout = finish(start(spec, store, log))
    assert (code, json.loads(stdout)["status"]) == (0, "complete")
    told = log.read_text()
    assert f"{newest.name}: got" in told
    assert "Falling back to the state before it." in told
    assert f"resuming {NAME} from step {int(before.stem[5:])}" in told
    assert differences(reference, read_saved(store)) == []
    assert verify(store).returncode == 0


def test_the_place_and_the_hash_seed_play_no_part(spec: Path, tmp_path: Path, reference: Saved) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    code, stdout = finish(start("../spec.json", "store", tmp_path / "log", cwd=elsewhere, hash_seed="12345"))
    assert (code, json.loads(stdout)["store"]) == (0, "store")
    assert differences(reference, read_saved(elsewhere / "store")) == []


def test_cadences_play_no_part(tmp_path: Path, reference: Saved) -> None:
    """Field fault 31: another plan gives the same bits wherever both look."""
    run = {
        "checkpoint_at": {"log": 9, "also": [10, 118]},
        "evaluate_at": {"linear": 9, "also": [7]},
        "save_state_every": 50,
        "log_every": 17,
        "max_chunk": 32,
    }
    spec = write_spec(tmp_path / "spec.json", {**SPEC, "run": run})
    code, _ = finish(start(spec, tmp_path / "store", tmp_path / "log"))
    assert code == 0
    other = read_saved(tmp_path / "store")
    assert {0, 10, 118, TOTAL} <= other.checkpoints.keys() & reference.checkpoints.keys()
    assert differences(reference, other, common=True) == []
