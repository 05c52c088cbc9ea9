"""Storage that fails: a sample of the storage campaign, a disk that is really full, a folder that cannot be written."""

import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import attrs
import pytest

from icl.io.codec import with_run
from icl.io.rundir import read_run
from icl.io.store import open_store
from icl.io.verify import verify_run
from icl.loop import execute
from tests.emulator import BUCKET, Proxy, behind_proxy, emulator
from tests.faults import storage as small
from tests.faults.runs import SPEC, differences, finish, read_saved, start, verify, write_spec
from tests.faults.storage import print_table, try_gcs, try_local

EVERY = 24  # of the calls of one training; `python -m tests.faults.storage` tries them all


def test_any_call_to_the_system_may_fail(tmp_path: Path) -> None:
    assert print_table(try_local(tmp_path, EVERY, first=random.randint(1, EVERY))) == 0


def test_any_request_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field faults 68 and 73."""
    with emulator(tmp_path) as target, behind_proxy(target, monkeypatch) as server:
        assert print_table(try_gcs(server, tmp_path, EVERY, first=random.randint(1, EVERY))) == 0


@pytest.fixture(params=["local", "gcs"])
def store_that_only_grows(
    request: pytest.FixtureRequest, tmp_path: Path, gcs_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A store that lets nothing be removed or overwritten, as a bucket with a retention policy."""
    if request.param == "gcs":
        gcs_proxy.fault = lambda seen: "403" if seen.call in ("delete", "replace") else None
        return f"gs://{BUCKET}/{uuid.uuid4().hex}"

    def refuse(*paths: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    for function in ("unlink", "remove", "rename", "replace"):
        monkeypatch.setattr(os, function, refuse)
    return str(tmp_path / "store")


def test_where_nothing_may_be_removed_everything_is_saved(
    tmp_path: Path, store_that_only_grows: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays, which is said once; a run goes through its third state, and later starts find nobody in their way."""
    spec = attrs.evolve(small.SPEC, run=attrs.evolve(small.SPEC.run, heartbeat_seconds=0.05, save_state_every=1))
    execute(with_run(spec, store=str(tmp_path / "whole")))
    caplog.clear()
    left = iter([False, False, True])
    with caplog.at_level(logging.INFO):
        first = execute(with_run(spec, store=store_that_only_grows), should_stop=lambda: next(left))
        assert (first.status, first.step) == ("interrupted", 3)
        said = [record.getMessage() for record in caplog.records if "It stays" in record.getMessage()]
        assert len(said) == 1
        assert execute(with_run(spec, store=store_that_only_grows)).status == "complete"
    assert "watching" not in caplog.text
    assert execute(with_run(spec, store=store_that_only_grows)).status == "already_complete"
    run, _ = read_run(open_store(store_that_only_grows), first.run)
    assert run.state_steps() == list(range(1, 7))
    assert list(verify_run(run)) == []
    assert differences(read_saved(tmp_path / "whole"), read_saved(store_that_only_grows)) == []


needs_mounts = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="needs `unshare -rm`, which this system refuses: only in a mount namespace can a test fill a disk",
)


def within_mounts(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a mount namespace of its own, where it may mount over `folder`/store."""
    (folder / "store").mkdir()
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["unshare", "-rm", "sh", "-ec", script]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=True)


@needs_mounts
def test_a_full_disk_stops_the_run_and_more_space_lets_it_go_on(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "spec.json", SPEC)
    assert finish(start(spec, tmp_path / "whole", tmp_path / "log"))[0] == 0
    script = """
    mount -t tmpfs -o size=400k none store
    set +e
    $PYTHON -m icl.run spec.json --store store 2> first.log; echo "first: $?"
    $PYTHON -m icl.store verify store; echo "verify: $?"
    mount -o remount,size=100m store
    $PYTHON -m icl.run spec.json --store store 2> second.log; echo "second: $?"
    cp -r store kept
    """
    told = within_mounts(script, tmp_path).stdout
    assert "first: 4" in told
    assert "verify: 0" in told
    assert "second: 0" in told
    assert "no space left on device; expected a usable store. Free some space" in (tmp_path / "first.log").read_text()
    assert "resuming" in (tmp_path / "second.log").read_text()
    assert differences(read_saved(tmp_path / "whole"), read_saved(tmp_path / "kept")) == []


@needs_mounts
def test_a_full_disk_may_be_waited_for(tmp_path: Path) -> None:
    """`run.on_save_failure` "continue": the disk grows while the run trains on, and everything is saved in the end."""
    spec = write_spec(tmp_path / "spec.json", {**SPEC, "run": {**SPEC["run"], "on_save_failure": "continue"}})
    assert finish(start(spec, tmp_path / "whole", tmp_path / "log"))[0] == 0
    script = """
    mount -t tmpfs -o size=400k none store
    $PYTHON -m icl.run spec.json --store store 2> log2 &
    until grep -q "Trying again" log2; do sleep 0.1; done
    mount -o remount,size=100m store
    set +e
    wait $!; echo "run: $?"
    cp -r store kept
    """
    assert "run: 0" in within_mounts(script, tmp_path).stdout
    assert differences(read_saved(tmp_path / "whole"), read_saved(tmp_path / "kept")) == []
    assert verify(tmp_path / "kept").returncode == 0


@needs_mounts
def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    write_spec(tmp_path / "spec.json", SPEC)
    script = """
    mount -t tmpfs -o ro none store
    set +e
    $PYTHON -m icl.run spec.json --store store 2> log; echo "run: $?"
    """
    assert "run: 4" in within_mounts(script, tmp_path).stdout
    told = (tmp_path / "log").read_text()
    assert "read-only file system; expected a usable store. Choose a store that can be written" in told
    assert "Traceback" not in told
