"""`python -m icl.fleet up|status|logs|down`: a sweep on many TPU VMs by SkyPilot; see `icl.engines.fleet`."""

import argparse
import subprocess
import sys
from pathlib import Path

from icl.attempt import guarded
from icl.core.errors import SpecError
from icl.core.spec import WandbSpec
from icl.core.words import counted
from icl.engines.fleet import Fleet, cancel, find_sky, job_name, launch, require_package
from icl.engines.session import session_of
from icl.engines.wandb import register_sweep
from icl.exit_codes import ExitCode, describe_exit_codes
from icl.io.location import is_local, resolve_location
from icl.io.sweepfile import Sweep, inline_sweep, load_sweep
from icl.sweep import main as sweep_command


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded(lambda: _do(arguments))


def _do(arguments: list[str] | None) -> int:
    options = _parser().parse_args(arguments)
    sweep = load_sweep(options.file, store=options.store)
    store = sweep.store
    if is_local(resolve_location(store)) or store.startswith("memory:"):
        raise SpecError(f"--store: got {store}; expected one that every VM reaches, as gs://bucket/runs.")
    folder = session_of(sweep.name, store).folder / "fleet"
    if options.command == "up":
        return _up(options, sweep, store, folder)
    sky = find_sky(options.sky)
    if options.command == "status":
        subprocess.run([sky, "jobs", "queue"], check=False)
        return sweep_command([options.file, "--store", store, "--list"])
    if options.command == "logs":
        return subprocess.run([sky, "jobs", "logs", "--name", job_name(sweep, options.vm)], check=False).returncode
    cancelled = cancel(sky, sweep, folder, options.vms)
    print("`sky jobs queue` shows what is left; SkyPilot's controller stops by itself when idle", file=sys.stderr)
    return ExitCode.COMPLETE if cancelled else ExitCode.INCOMPLETE


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
    require_package(options.package)
    queue = None
    if options.engine == "wandb":
        wandb = sweep.members[0].spec.run.wandb or WandbSpec()
        names = [member.name for member in sweep.members]
        queue = "ENTITY/PROJECT/ID" if options.dry_run else register_sweep(wandb, sweep.name, names)
    fleet = Fleet(
        name=job_name(sweep, 0).rpartition("-")[0],
        sweep_file=folder / "sweep.json",
        store=store,
        accelerator=options.accelerator,
        infra=options.infra,
        spot=not options.on_demand,
        package=options.package,
        wandb_sweep=queue,
    )
    if options.dry_run:
        print(fleet.yaml(), end="")
        return ExitCode.COMPLETE
    sky = find_sky(options.sky)
    kind = "on-demand" if options.on_demand else "spot"
    print(
        f"{counted(options.vms, f'{kind} VM')} ({options.accelerator}) for {counted(len(sweep.members), 'run')}, "
        "each until its part is done or `down`. They cost money from now on, and so does SkyPilot's controller, a "
        "small VM that stops when idle.",
        file=sys.stderr,
    )
    if not options.yes and input("Start them? [y/N] ").strip().lower() not in ("y", "yes"):
        return ExitCode.INCOMPLETE
    started = launch(sky, fleet, sweep, inline_sweep(options.file), options.vms)
    if started < options.vms:
        print(f"error: VM {started} did not start; {started} before it did. `down` cancels them.", file=sys.stderr)
        return ExitCode.INCOMPLETE
    return ExitCode.COMPLETE


def _positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number from 1 to 1000")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
