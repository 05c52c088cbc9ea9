"""Fleets: the job that SkyPilot is given, read by its own parser, and what it is told to do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from icl.fleet import main
from icl.io.sweepfile import inline_sweep, load_sweep
from tests.faults.runs import SPEC
from tests.wandb_server import wandb_server

SWEEPS = Path(__file__).parents[2] / "specs" / "sweeps"
STORE = "gs://bucket/runs"
SKYPILOT = "skypilot==0.14.1"
READ = """
import json, sky, sys
found = []
for path in sys.argv[1:]:
    task = sky.Task.from_yaml(path)
    (resources,) = task.resources
    found.append({
        "name": task.name, "run": task.run, "setup": task.setup, "envs": task.envs, "workdir": task.workdir,
        "accelerators": resources.accelerators, "spot": resources.use_spot, "args": resources.accelerator_args,
        "recovery": resources.job_recovery, "cloud": str(resources.cloud), "region": resources.region,
        "mounts": task.file_mounts,
    })
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def sky(tmp_path: Path) -> Path:
    """A program that notes what it is told, and fails when a file says so."""
    program = tmp_path / "sky"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\ntest ! -e {tmp_path}/fail\n')
    program.chmod(0o755)
    return program


def inlined(sweep: Path) -> str:
    """A sweep file's text with its base in it, so that it can be read from anywhere."""
    return json.dumps(inline_sweep(sweep))


def dry_run(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    assert main(["up", *arguments, "--store", STORE, "--dry-run"]) == 0
    return capfd.readouterr().out


def test_skypilots_own_parser_reads_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In an environment of its own, since it cannot share one with wandb."""
    files = []
    variants = [
        [str(SWEEPS / "raventos-base.json"), "--vms", "10", "--infra", "gcp/us-central2"],
        [str(SWEEPS / "carroll.json"), "--vms", "4", "--accelerator", "tpu-v6e-4", "--on-demand", "--engine", "wandb"],
        [
            str(SWEEPS / "hoogland-seeds.json"),
            "--vms",
            "1",
            "--package",
            "icl-regression[tpu,gcs] @ git+https://example.org/icl",
        ],
    ]
    odd = tmp_path / f"-- Süß__sweep (1)...{'x' * 99}_.json"
    odd.write_text(inlined(SWEEPS / "carroll.json"))
    variants.append([str(odd), "--vms", "2"])
    for number, arguments in enumerate(variants):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(dry_run(capfd, *arguments))
    for line in files[0].read_text().splitlines():
        if line.startswith("  ~/icl-sweep.json: "):  # its parser wants to find what it would copy
            mounted = Path(json.loads(line.partition(": ")[2]))
            mounted.parent.mkdir(parents=True, exist_ok=True)
            mounted.write_text("{}")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--prefer-binary", "--no-compile", SKYPILOT], check=True)
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run([python, "-c", READ, *files], capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr
    spot, on_demand, packaged, _ = json.loads(done.stdout.splitlines()[-1])
    assert spot["accelerators"] == {"tpu-v4-8": 1}
    assert (spot["spot"], on_demand["spot"]) == (True, False)
    assert spot["args"] == {"tpu_vm": True, "runtime_version": "tpu-ubuntu2204-base"}
    assert (spot["cloud"], spot["region"]) == ("GCP", "us-central2")
    assert spot["recovery"]["recover_on_exit_codes"] == [75]
    assert spot["envs"] == {"ICL_SHARD": "0/1"}
    assert spot["run"].startswith(
        "exec python3 -m icl.sweep ~/icl-sweep.json --store 'gs://bucket/runs' --devices tpu:all"
    )
    assert spot["run"].rstrip().endswith('--shard "$ICL_SHARD"')
    assert on_demand["run"].rstrip().endswith("--engine wandb --wandb-sweep ENTITY/PROJECT/ID")
    assert "git+https://example.org/icl" in packaged["setup"]
    assert packaged["workdir"] is None


@pytest.mark.parametrize("stem", ["a", "Süß sweep (1)!", "a__b", "--a--", "...", "9" * 200, "ﬁne"])
def test_jobs_have_names_that_skypilot_takes(tmp_path: Path, stem: str, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"{stem}.json"
    file.write_text(inlined(SWEEPS / "hoogland-seeds.json"))
    name = json.loads(dry_run(capfd, str(file), "--vms", "1").splitlines()[0].removeprefix("name: "))
    assert re.fullmatch(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", name), "its own rule, in sky/task.py of 0.14.1"
    assert len(name) < 64
    assert name.endswith(load_sweep(file).name.rpartition("-")[2]), "the digest tells sweeps apart"


def test_a_fleet_is_started_watched_and_ended(
    tmp_path: Path, sky: Path, capfd: pytest.CaptureFixture[str], gcs: object
) -> None:
    (tmp_path / "base.json").write_text(json.dumps(SPEC))
    file = tmp_path / "some.json"
    file.write_text(json.dumps({"base": "base.json", "grid": {"seeds.init": [0, 1, 2]}}))
    common = [str(file), "--store", STORE, "--sky", str(sky)]
    assert main(["up", *common, "--vms", "2", "--yes"]) == 0
    assert "2 spot VMs (tpu-v4-8) for 3 runs" in capfd.readouterr().err
    name = f"icl-{load_sweep(file).name}"
    job, copied = (next((tmp_path / "state").rglob(f)) for f in ("job.yaml", "sweep.json"))
    assert f"~/icl-sweep.json: {json.dumps(str(copied))}" in job.read_text()
    assert load_sweep(copied).members == load_sweep(file).members, "it stands alone"
    assert main(["status", *common]) == 1
    assert capfd.readouterr().out.count("pending") == 3
    assert main(["logs", *common, "--vm", "1"]) == 0
    assert main(["down", *common]) == 0
    assert (tmp_path / "told").read_text().splitlines() == [
        f"jobs launch --yes --detach-run --name {name}-0 --env ICL_SHARD=0/2 {job}",
        f"jobs launch --yes --detach-run --name {name}-1 --env ICL_SHARD=1/2 {job}",
        "jobs queue",
        f"jobs logs --name {name}-1",
        f"jobs cancel --yes --name {name}-0",
        f"jobs cancel --yes --name {name}-1",
    ]


def test_w_and_b_divides_the_work_where_it_is_asked_to(
    tmp_path: Path, sky: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with wandb_server() as server:
        for key, value in {**server.environment, "HOME": str(tmp_path)}.items():
            monkeypatch.setenv(key, value)
        file = str(SWEEPS / "hoogland-seeds.json")
        code = main(["up", file, "--store", STORE, "--sky", str(sky), "--vms", "1", "--yes", "--engine", "wandb"])
        assert code == 0
        assert len(server.queue) == 11
    (job,) = (tmp_path / "state").rglob("job.yaml")
    assert "--engine wandb --wandb-sweep tester/icl/sweep0" in job.read_text()
    assert "--secret WANDB_API_KEY" in (tmp_path / "told").read_text()
    assert server.environment["WANDB_API_KEY"] not in (tmp_path / "told").read_text() + job.read_text()


def test_nothing_is_started_without_a_yes(tmp_path: Path, sky: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda question: "")
    arguments = [str(SWEEPS / "carroll.json"), "--store", STORE, "--sky", str(sky), "--vms", "1"]
    assert main(["up", *arguments]) == 1
    assert not (tmp_path / "told").exists()


def test_a_vm_that_does_not_start_is_said(tmp_path: Path, sky: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fail").touch()
    arguments = [str(SWEEPS / "carroll.json"), "--store", STORE, "--sky", str(sky), "--vms", "3", "--yes"]
    assert main(["up", *arguments]) == 1
    assert "VM 0 did not start; 0 before it did" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["up", "--vms", "1", "--store", "runs"], 2, "expected one that every VM reaches"),
        (["up", "--vms", "1", "--store", STORE, "--yes", "--sky", "no-such-sky"], 3, "uv tool install"),
        (["down", "--store", STORE, "--sky", "true"], 2, "no record of `up` on this machine"),
    ],
)
def test_mistakes(arguments: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    command, *rest = arguments
    assert main([command, str(SWEEPS / "carroll.json"), *rest]) == code
    assert said in capfd.readouterr().err


def test_without_a_clone_nothing_is_installed_from_the_package_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where another project has the name `icl`."""
    monkeypatch.setattr("icl.engines.fleet._SOURCE", tmp_path)
    up = ["up", str(SWEEPS / "carroll.json"), "--store", STORE, "--vms", "1", "--dry-run"]
    assert main(up) == 2
    assert "expected what pip installs on the VMs" in capfd.readouterr().err
    assert main([*up, "--package", "./icl.whl[tpu]"]) == 0
    assert "pip install --quiet './icl.whl[tpu]'" in capfd.readouterr().out


def test_every_spec_field_survives_the_copy(tmp_path: Path) -> None:
    base: dict[str, Any] = {**SPEC, "run": {**SPEC["run"], "wandb": {"project": "mine"}}}
    file = tmp_path / "some.json"
    file.write_text(json.dumps({"base": base, "list": [{"seeds.init": 1}]}))
    (member,) = load_sweep(file).members
    assert member.spec.run.wandb is not None
    assert member.spec.run.wandb.project == "mine"
