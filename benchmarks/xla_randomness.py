"""What torch_xla's random generator does, each line shown by fresh processes: `python -m benchmarks.xla_randomness`.

Runs on PJRT CPU unless PJRT_DEVICE says otherwise. docs/randomness.md draws the conclusions.
"""

import json
import os
import subprocess
import sys

Draws = list[list[float]]  # the first and the second of three numbers
DRAWS = """
import json, torch, torch_xla, torch_xla.core.xla_model as xm

def draws(setup=None, between=lambda: None, device=torch_xla.device()):
    if setup:
        setup()
    first = torch.randn(3, device=device)
    between()
    second = torch.randn(3, device=device)
    return [[round(x, 6) for x in draw.tolist()] for draw in (first, second)]

def seed(number):
    return lambda: xm.set_rng_state(number, str(torch_xla.device()))
"""


def fresh(*calls: str) -> list[Draws]:
    """What those calls of `draws` give, one after the other in a fresh process; a seed begins anew."""
    environment = {"PJRT_DEVICE": "CPU", **os.environ}
    script = f"{DRAWS}\nprint(json.dumps([{', '.join(calls)}]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    found: list[Draws] = json.loads(done.stdout)
    return found


def findings() -> dict[str, bool]:
    """Each statement of docs/randomness.md about the generator, and whether it holds here."""
    unseeded, seeded, other = fresh("draws()", "draws(seed(7))", "draws(seed(8))")
    again, seeded_again, cut = fresh("draws()", "draws(seed(7))", "draws(seed(7), torch_xla.sync)")
    torch_seeded, on_cpu = fresh(
        "draws(lambda: torch.manual_seed(7))", "draws(lambda: torch.manual_seed(7), device='cpu')"
    )
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
