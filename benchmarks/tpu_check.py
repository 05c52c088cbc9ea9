"""Does every promise hold on this TPU VM? One line each, in under 10 minutes: `python -m benchmarks.tpu_check`.

Runs wherever the XLA backend runs (PJRT_DEVICE=CPU imitates a TPU). This process never opens the device: a chip
belongs to one process at a time, so each check is a fresh one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.xla_randomness import findings
from icl.core.backend import identical
from icl.core.families.linear import LinearTask
from icl.core.spec import EvaluationSpec, RunSpec, Spec, StepsSpec, TrainingSpec
from icl.io.codec import encode_spec, load_spec
from icl.io.names import run_name
from icl.results import load_run

Line = tuple[bool | None, str]  # holds, does not, or was not to be judged here; and what was seen
CHIP = """
from icl.backends import get_backend
from torch_xla._internal import tpu
import json
print(json.dumps([get_backend("xla").describe(), tpu.num_available_chips()]))
"""
WITHOUT_XLA = """
import sys
sys.modules["torch_xla"] = None
from safetensors.torch import load_file
print(sum(leaf.numel() for leaf in load_file(sys.argv[1]).values()))
"""


def default_spec() -> Spec:
    """Hoogland et al.'s model for 1,024 steps with log-spaced checkpoints and evaluations."""
    cadence = StepsSpec(log=20, linear=5)
    return Spec(
        task=LinearTask(task_dim=4, num_examples=8),
        training=TrainingSpec(total_steps=1024),
        evaluation=EvaluationSpec(batch_size=2048),
        run=RunSpec(backend="xla", checkpoint_at=cadence, evaluate_at=cadence),
    )


def python(*arguments: str, **environment: str) -> str:
    """The standard output of a fresh Python process. Raises CalledProcessError, its messages shown."""
    done = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout


class Check:
    """The runs that the checks look at, in a folder."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        self.spec, self.folder, self.name = spec, folder, run_name(spec)
        self.num_chips = 0
        self.file = folder / "spec.json"
        self.file.write_bytes(encode_spec(spec))

    def command(self, store: str, backend: str = "xla") -> list[str]:
        """The command line of one run."""
        return ["-m", "icl.run", str(self.file), "--backend", backend, "--store", str(self.folder / store)]

    def profile(self, store: str) -> dict[str, dict[str, float]]:
        """What the manifest of a finished run counted."""
        found: dict[str, dict[str, float]] = load_run(str(self.folder / store), self.name).attempts()[-1]["profile"]
        return found

    def differences(self, one: str, other: str) -> int:
        """How many checkpoints of two runs differ in any bit, and whether the metrics do."""
        runs = [load_run(str(self.folder / store), self.name) for store in (one, other)]
        different = sum(not identical(runs[0].params(step), runs[1].params(step)) for step in runs[0].steps)
        return different + (not runs[0].metrics().equals(runs[1].metrics()))

    def device(self) -> Line:
        description, self.num_chips = json.loads(python("-c", CHIP))
        return True, str(description)

    def seeds(self) -> Line:
        wrong = [statement for statement, holds in findings().items() if not holds]
        return not wrong, "; ".join(wrong) or "docs/randomness.md holds here"

    def same_bits_twice(self) -> Line:
        for store in ("first", "second"):
            python(*self.command(store))
        different = self.differences("first", "second")
        return different == 0, f"{different} differences between two runs in fresh processes"

    def programs(self) -> Line:
        counted = self.profile("first")
        train, evaluate = (int(counted[phase]["compilations"]) for phase in ("train", "evaluate"))
        bad = int(sum(phase["cpu_fallbacks"] + phase["scalar_reads"] for phase in counted.values()))
        seconds = sum(phase["compile_seconds"] for phase in counted.values())
        text = f"{train} training and {evaluate} evaluation programs, {seconds:.0f} s to compile, {bad} CPU fallbacks"
        return train <= 6 and evaluate <= 2 and bad == 0, text

    def loads_without_torch_xla(self) -> Line:
        step = self.spec.training.total_steps
        path = self.folder / "first" / self.name / "checkpoints" / f"step-{step:012d}.safetensors"
        count = int(python("-c", WITHOUT_XLA, str(path)))
        return count > 0, f"{count} parameters with torch and safetensors alone"

    def one_run_a_chip(self) -> Line:
        chips = self.num_chips
        if os.environ.get("PJRT_DEVICE") != "CPU" and chips < 2:
            return None, f"{chips} chip: nothing to keep apart"
        stores = [f"chip{i}" for i in range(min(max(chips, 2), 4))]
        processes = [
            subprocess.Popen(
                [sys.executable, *self.command(store)], stdout=subprocess.DEVNULL, env={**os.environ, **one_chip(index)}
            )
            for index, store in enumerate(stores)
        ]
        codes = [process.wait() for process in processes]
        different = sum(self.differences("first", store) for store in stores) if not any(codes) else -1
        return different == 0, f"{len(stores)} runs at once: exit codes {codes}, {different} differences from one alone"

    def faster_than_the_cpu(self) -> Line:
        python(*self.command("cpu", "cpu"))
        seconds = {}
        for store in ("cpu", "first"):
            train = self.profile(store)["train"]
            seconds[store] = train["wall_seconds"] - train.get("compile_seconds", 0.0)
        ratio = seconds["cpu"] / seconds["first"]
        milliseconds = {store: 1e3 * value / self.spec.training.total_steps for store, value in seconds.items()}
        text = f"{milliseconds['first']:.2f} ms a step, {milliseconds['cpu']:.2f} on the CPU: {ratio:.2f} times as fast"
        return (None if os.environ.get("PJRT_DEVICE") == "CPU" else ratio > 1), text

    def lines(self) -> Iterator[tuple[str, Callable[[], Line]]]:
        """The checks in order; later ones look at the runs of earlier ones."""
        yield "device found", self.device
        yield "seeds", self.seeds
        yield "same bits twice", self.same_bits_twice
        yield "programs and fallbacks", self.programs
        yield "checkpoint loads without torch_xla", self.loads_without_torch_xla
        yield "one run a chip, kept apart", self.one_run_a_chip
        yield "faster than the host's CPU", self.faster_than_the_cpu


def one_chip(index: int) -> dict[str, str]:
    """The variables that give a process one chip of a TPU VM, in both spellings; harmless on the CPU."""
    port = 8476 + index
    return {
        "TPU_VISIBLE_CHIPS": str(index),
        "TPU_VISIBLE_DEVICES": str(index),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": str(port),
        "TPU_MESH_CONTROLLER_ADDRESS": f"localhost:{port}",
        "TPU_MESH_CONTROLLER_PORT": str(port),
        "CLOUD_TPU_TASK_ID": "0",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", help="another spec than the default of 1,024 steps")
    options = parser.parse_args()
    spec = default_spec() if options.spec is None else load_spec(options.spec)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, check in Check(spec, Path(folder)).lines():
            holds: bool | None = False
            try:
                holds, seen = check()
            except (subprocess.CalledProcessError, KeyError, OSError, RuntimeError) as error:
                seen = f"{type(error).__name__}: {error}"
            failed += holds is False
            print(f"{'-' if holds is None else 'yes' if holds else 'NO':>3}  {name}: {seen}", flush=True)
    print(f"{failed} of the promises do not hold here" if failed else "every promise that can be judged here holds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
