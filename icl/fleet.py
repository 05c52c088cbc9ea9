"""`python -m icl.fleet up|status|logs|down`: a sweep on many TPU VMs, which SkyPilot starts, replaces and deletes.

SkyPilot is a program with an environment of its own. Each VM is one managed job that runs `icl.sweep` on its chips; a
W&B sweep divides the work, or else each VM takes its share of the list, and the store keeps doubles apart.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attrs

from icl.attempt import guarded
from icl.core.errors import BackendUnavailableError, SpecError
from icl.core.spec import WandbSpec
from icl.engines.session import session_of
from icl.engines.wandb import register_sweep
from icl.exit_codes import ExitCode, describe_exit_codes
from icl.io.errors import StoreError
from icl.io.place import is_local, place_of
from icl.io.sweepfile import Sweep, inline_sweep, load_sweep
from icl.sweep import main as sweep_command

_SOURCE = Path(__file__).resolve().parents[1]
_RUNTIMES = {"tpu-v2": "tpu-ubuntu2204-base", "tpu-v3": "tpu-ubuntu2204-base", "tpu-v4": "tpu-ubuntu2204-base"}
_LONGEST_STEM = 40  # of the sweep file's name in that of a job
_ON_VM = "~/icl-sweep.json"


@attrs.frozen
class Fleet:
    """What one VM is and does; `share` is which part of the sweep it takes, or the W&B sweep that gives it runs."""

    name: str
    sweep_file: Path
    store: str
    accelerator: str
    infra: str | None
    spot: bool
    package: str | None
    wandb_sweep: str | None

    def yaml(self) -> str:
        """The managed job, as SkyPilot reads it; ICL_SHARD is set for each VM when it is launched."""
        resources = [f"accelerators: {_quoted(self.accelerator)}", f"use_spot: {'true' if self.spot else 'false'}"]
        if self.infra:
            resources.append(f"infra: {_quoted(self.infra)}")
        runtime = _RUNTIMES.get("-".join(self.accelerator.split("-")[:2]))
        arguments = ["accelerator_args:", "  tpu_vm: true", *([f"  runtime_version: {runtime}"] if runtime else [])]
        # 75: a sweep that was asked to stop although its VM lives, as by a watchdog.
        recovery = ["job_recovery:", "  max_restarts_on_errors: 3", "  recover_on_exit_codes: [75]"]
        indented = "\n".join(f"  {line}" for line in [*resources, *arguments, *recovery])
        divide = f"--engine wandb --wandb-sweep {self.wandb_sweep}" if self.wandb_sweep else '--shard "$ICL_SHARD"'
        source = f"workdir: {_quoted(str(_SOURCE))}\n" if self.package is None else ""
        package = self.package or ".[tpu,gcs,wandb]"
        return (
            f"name: {_quoted(self.name)}\n{source}"
            f"file_mounts:\n  {_ON_VM}: {_quoted(str(self.sweep_file))}\n"
            f"resources:\n{indented}\n"
            'envs:\n  ICL_SHARD: "0/1"\n'
            f"setup: |\n  python3 -m pip install --quiet '{package}'\n"
            f"run: |\n  exec python3 -m icl.sweep {_ON_VM} --store '{self.store}' --devices tpu:all {divide}\n"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded(lambda: _do(arguments))


def _do(arguments: list[str] | None) -> int:
    options = _parser().parse_args(arguments)
    sweep = load_sweep(options.file, store=options.store)
    store = sweep.store
    if is_local(place_of(store)) or store.startswith("memory:"):
        raise SpecError(f"--store: got {store}; expected one that every VM reaches, as gs://bucket/runs.")
    folder = session_of(sweep.name, store).folder / "fleet"
    if options.command == "up":
        return _up(options, sweep, store, folder)
    sky = _find_sky(options.sky)
    if options.command == "status":
        subprocess.run([sky, "jobs", "queue"], check=False)
        return sweep_command([options.file, "--store", store, "--list"])
    if options.command == "logs":
        return subprocess.run([sky, "jobs", "logs", "--name", _job(sweep, options.vm)], check=False).returncode
    return _down(sky, sweep, folder, options.vms)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m icl.fleet",
        description="Train a sweep on many TPU VMs by SkyPilot's managed jobs.",
        epilog=describe_exit_codes(*(code for code in ExitCode if code <= ExitCode.STORE)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start the VMs, each on its part of the sweep")
    status = commands.add_parser("status", help="SkyPilot's queue, and where each run stands, from the store")
    logs = commands.add_parser("logs", help="follow the log of one VM")
    down = commands.add_parser("down", help="cancel the jobs, which deletes the VMs; what is saved stays")
    for command in (up, status, logs, down):
        command.add_argument("file", metavar="FILE", help="the sweep")
        command.add_argument("--store", metavar="URL", help="override run.store: a bucket, as gs://bucket/runs")
        command.add_argument("--sky", metavar="PATH", help="SkyPilot's program; default: sky on the PATH")
    for command in (up, down):
        command.add_argument("--vms", type=_positive, metavar="N", help="how many", required=command is up)
    logs.add_argument("--vm", type=int, default=0, metavar="I", help="which, from 0")
    up.add_argument("--accelerator", default="tpu-v4-8", help="one VM, in SkyPilot's words (default tpu-v4-8: 4 chips)")
    up.add_argument("--infra", help="where, as gcp/us-central2/us-central2-b; default: wherever SkyPilot finds it")
    up.add_argument("--on-demand", action="store_true", help="not spot VMs, which cost less and may be taken away")
    up.add_argument("--engine", choices=("shard", "wandb"), default="shard", help="who divides the work: default shard")
    up.add_argument("--package", metavar="SPEC", help="what pip installs there; default: this clone")
    up.add_argument("--dry-run", action="store_true", help="print the job and start nothing")
    up.add_argument("--yes", action="store_true", help="do not ask before spending money")
    return parser


def _up(options: argparse.Namespace, sweep: Sweep, store: str, folder: Path) -> int:
    package = options.package
    if package is None and not (_SOURCE / "pyproject.toml").exists():
        raise SpecError(
            f"--package: got nothing, and {_SOURCE} is not a clone that could be sent; expected what pip installs on "
            "the VMs. Run from a clone, or name one with --package."
        )
    queue = None
    if options.engine == "wandb":
        wandb = sweep.members[0].spec.run.wandb or WandbSpec()
        names = [member.name for member in sweep.members]
        queue = "ENTITY/PROJECT/ID" if options.dry_run else register_sweep(wandb, sweep.name, names)
    file = folder / "sweep.json"
    fleet = Fleet(
        name=_job(sweep, 0).rpartition("-")[0],
        sweep_file=file,
        store=store,
        accelerator=options.accelerator,
        infra=options.infra,
        spot=not options.on_demand,
        package=package,
        wandb_sweep=queue,
    )
    if options.dry_run:
        print(fleet.yaml(), end="")
        return 0
    sky = _find_sky(options.sky)
    kind = "on-demand" if options.on_demand else "spot"
    print(
        f"{options.vms} {kind} VMs ({options.accelerator}) for {len(sweep.members)} runs, each until its part is done "
        "or `down`. They cost money from now on, and so does SkyPilot's controller, a small VM that stops when idle.",
        file=sys.stderr,
    )
    if not options.yes and input("Start them? [y/N] ").strip().lower() not in ("y", "yes"):
        return 1
    job = folder / "job.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(inline_sweep(options.file), indent=2))
        job.write_text(fleet.yaml())
        (folder / "vms").write_text(str(options.vms))
    except OSError as error:
        raise StoreError(
            f"{folder}: got {error.strerror or error}; expected a folder that can be written, for what is known of "
            "this fleet. Free some room there, or set XDG_STATE_HOME to another place."
        ) from None
    secret = ["--secret", "WANDB_API_KEY"] if "WANDB_API_KEY" in os.environ else []
    for index in range(options.vms):
        shard = f"ICL_SHARD={index}/{options.vms}"
        command = [sky, "jobs", "launch", "--yes", "--detach-run", "--name", _job(sweep, index), "--env", shard]
        if subprocess.run([*command, *secret, str(job)], check=False).returncode != 0:
            print(f"error: VM {index} did not start; {index} before it did. `down` cancels them.", file=sys.stderr)
            return 1
    return 0


def _down(sky: str, sweep: Sweep, folder: Path, given: int | None) -> int:
    recorded = folder / "vms"
    if given is None and not recorded.exists():
        raise SpecError(
            "--vms: got nothing, and no record of `up` on this machine; expected how many there are. Add it."
        )
    count = given if given is not None else int(recorded.read_text())
    commands = [[sky, "jobs", "cancel", "--yes", "--name", _job(sweep, index)] for index in range(count)]
    codes = [subprocess.run(command, check=False).returncode for command in commands]
    print("`sky jobs queue` shows what is left; SkyPilot's controller stops by itself when idle", file=sys.stderr)
    return 1 if any(codes) else 0


def _job(sweep: Sweep, index: int) -> str:
    """What SkyPilot calls the job of a VM: letters, digits and single dashes, the sweep's digest among them."""
    stem, _, digest = sweep.name.rpartition("-")
    words = re.findall("[a-z0-9]+", stem.lower()[:_LONGEST_STEM])
    return "-".join(["icl", *words, digest, str(index)])


def _find_sky(given: str | None) -> str:
    found = shutil.which(given or "sky")
    if found is None:
        raise BackendUnavailableError(
            f"SkyPilot: got no program {given or 'sky'!r}; expected it, in an environment of its own beside this one. "
            "Install it with `uv tool install 'skypilot[gcp]==0.14.1'` or `pipx install 'skypilot[gcp]==0.14.1'`, then "
            "`sky check gcp`; or name it with --sky."
        )
    return found


def _quoted(text: str) -> str:
    return json.dumps(text)  # which YAML reads as well


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number from 1 to 1000")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
