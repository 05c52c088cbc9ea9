"""What torch_xla's random generator does, each line shown by fresh processes: `python -m benchmarks.xla_randomness`.

Runs on PJRT CPU unless PJRT_DEVICE says otherwise. docs/randomness.md draws the conclusions.
"""

import os
import subprocess
import sys

DRAW = """
import torch, torch_xla, torch_xla.core.xla_model as xm
device = torch_xla.device()
{setup}
first = torch.randn(3, device=device)
{between}
second = torch.randn(3, device=device)
print([round(x, 6) for x in first.tolist()], [round(x, 6) for x in second.tolist()], sep="|")
"""


def draws(setup: str = "", between: str = "") -> list[str]:
    """The first and the second draw of a fresh process."""
    script = DRAW.format(setup=setup, between=between)
    environment = {"PJRT_DEVICE": "CPU", **os.environ}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip().split("|")


def findings() -> dict[str, bool]:
    """Each statement of docs/randomness.md about the generator, and whether it holds here."""
    unseeded, again = draws(), draws()
    torch_seeded = draws("torch.manual_seed(7)")
    seeded, seeded_again = draws("xm.set_rng_state(7, str(device))"), draws("xm.set_rng_state(7, str(device))")
    other = draws("xm.set_rng_state(8, str(device))")
    cut = draws("xm.set_rng_state(7, str(device))", "torch_xla.sync()")
    on_cpu = draws("torch.manual_seed(7); device = torch.device('cpu')")
    for name, values in (
        ("unseeded", unseeded),
        ("torch.manual_seed(7)", torch_seeded),
        ("xm.set_rng_state(7)", seeded),
        ("xm.set_rng_state(7), a barrier between the draws", cut),
        ("torch.manual_seed(7) on the CPU generator", on_cpu),
    ):
        print(f"{name:50} {values[0]} {values[1]}")
    return {
        "fresh processes draw the same numbers without any seeding": unseeded == again,
        "torch.manual_seed does not change what the device draws": torch_seeded == unseeded,
        "xm.set_rng_state does, and repeats them": seeded == seeded_again and seeded != unseeded and seeded != other,
        "a barrier between two draws changes the second": cut[0] == seeded[0] and cut[1] != seeded[1],
        "the CPU generator with the same seed draws other numbers": on_cpu[0] != seeded[0],
    }


def main() -> int:
    found = findings()
    for statement, holds in found.items():
        print(f"{'yes' if holds else 'NO':>3}  {statement}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
