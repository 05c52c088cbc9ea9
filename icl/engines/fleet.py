"""A fleet: a sweep on many TPU VMs, which SkyPilot starts, replaces and deletes.

SkyPilot is a program with an environment of its own. Each VM is one managed job that runs `icl.sweep` on its chips; a
W&B sweep divides the work, or else each VM takes its share of the list, and the store keeps doubles apart.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import attrs

from icl.core.errors import BackendUnavailableError, SpecError
from icl.engines.retries import RetryPolicy
from icl.exit_codes import ExitCode
from icl.io.errors import StoreError
from icl.io.sweepfile import Sweep

_SOURCE = Path(__file__).resolve().parents[2]
_RUNTIMES = {"tpu-v2": "tpu-ubuntu2204-base", "tpu-v3": "tpu-ubuntu2204-base", "tpu-v4": "tpu-ubuntu2204-base"}
_LONGEST_STEM = 40  # of the sweep file's name in that of a job
_ON_VM = "~/icl-sweep.json"


@attrs.frozen
class Fleet:
    """What one VM is and does; without `wandb_sweep`, which gives it runs, it takes its share of the list."""

    name: str
    sweep_file: Path
    store: str
    accelerator: str
    infra: str | None
    spot: bool
    package: str | None
    wandb_sweep: str | None
    retries: RetryPolicy = attrs.field(factory=RetryPolicy)

    def yaml(self) -> str:
        """The managed job, as SkyPilot reads it; ICL_SHARD is set for each VM when it is launched."""
        resources = [f"accelerators: {_quoted(self.accelerator)}", f"use_spot: {'true' if self.spot else 'false'}"]
        if self.infra:
            resources.append(f"infra: {_quoted(self.infra)}")
        runtime = _RUNTIMES.get("-".join(self.accelerator.split("-")[:2]))
        arguments = ["accelerator_args:", "  tpu_vm: true", *([f"  runtime_version: {runtime}"] if runtime else [])]
        recovery = [
            "job_recovery:",
            f"  max_restarts_on_errors: {self.retries.max_job_restarts}",
            # A sweep that was asked to stop although its VM lives, as by a watchdog.
            f"  recover_on_exit_codes: [{int(ExitCode.INTERRUPTED)}]",
        ]
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


def require_package(package: str | None) -> None:
    """Raises SpecError when there is nothing that pip could install on the VMs: neither a package nor a clone."""
    if package is None and not (_SOURCE / "pyproject.toml").exists():
        raise SpecError(
            f"--package: got nothing, and {_SOURCE} is not a clone that could be sent; expected what pip installs on "
            "the VMs. Run from a clone, or name one with --package."
        )


def launch(sky: str, fleet: Fleet, sweep: Sweep, plain: object, num_vms: int) -> int:
    """Start a job for each VM; returns how many started, which is fewer than `num_vms` when one did not.

    Args:
        plain: the sweep's file with its base in it.

    Raises: StoreError when what is known of the fleet cannot be written beside `fleet.sweep_file`.
    """
    folder = fleet.sweep_file.parent
    job = folder / "job.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fleet.sweep_file.write_text(json.dumps(plain, indent=2))
        job.write_text(fleet.yaml())
        (folder / "vms").write_text(str(num_vms))
    except OSError as error:
        raise StoreError(
            f"{folder}: got {error.strerror or error}; expected a folder that can be written, for what is known of "
            "this fleet. Mend that, or set XDG_STATE_HOME to another place."
        ) from None
    secret = ["--secret", "WANDB_API_KEY"] if "WANDB_API_KEY" in os.environ else []
    for index in range(num_vms):
        command = [sky, "jobs", "launch", "--yes", "--detach-run", "--name", job_name(sweep, index)]
        command += ["--env", f"ICL_SHARD={index}/{num_vms}", *secret, str(job)]
        if subprocess.run(command, check=False).returncode != 0:
            return index
    return num_vms


def cancel(sky: str, sweep: Sweep, folder: Path, num_vms: int | None) -> bool:
    """Cancel every job, which deletes its VM; whether SkyPilot did so for all.

    Args:
        num_vms: how many there are; None for what `launch` has written into `folder`. Raises SpecError without either.
    """
    recorded = folder / "vms"
    if num_vms is None and not recorded.exists():
        raise SpecError(
            "--vms: got nothing, and no record of `up` on this machine; expected how many there are. Add it."
        )
    count = num_vms if num_vms is not None else int(recorded.read_text())
    commands = [[sky, "jobs", "cancel", "--yes", "--name", job_name(sweep, index)] for index in range(count)]
    codes = [subprocess.run(command, check=False).returncode for command in commands]  # every one, whatever fails
    return not any(codes)


def job_name(sweep: Sweep, index: int) -> str:
    """What SkyPilot calls the job of a VM: letters, digits and single dashes, the sweep's digest among them."""
    stem, _, digest = sweep.name.rpartition("-")
    words = re.findall("[a-z0-9]+", stem.lower()[:_LONGEST_STEM])
    return "-".join(["icl", *words, digest, str(index)])


def find_sky(given: str | None) -> str:
    """The path of SkyPilot's program. Raises BackendUnavailableError when there is none."""
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
