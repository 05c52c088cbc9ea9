"""A sweep on a Ray cluster of this machine alone, which is asked to stop once every run has begun.

`unshare --user --map-root-user --net python -m tests.faults.ray_stop FOLDER`, as for `ray_nodes`. FOLDER holds a
sweep.json of two runs; the store is made in it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.ray_nodes import raise_loopback

_SECONDS = 300.0


def main(folder: Path) -> int:
    """Run the sweep, send it SIGTERM, and print its exit code with what it said."""
    raise_loopback()
    command = [sys.executable, "-m", "icl.sweep", str(folder / "sweep.json"), "--store", str(folder / "store")]
    with (folder / "log").open("wb") as log:
        sweep = subprocess.Popen([*command, "--engine", "ray", "--devices", "cpu"], stdout=log, stderr=log)
    deadline = time.monotonic() + _SECONDS
    while len(list(folder.glob("store/*/checkpoints/step-*1.safetensors"))) < 2:
        assert time.monotonic() < deadline, "the runs do not begin"
        assert sweep.poll() is None, "the sweep has ended too early"
        time.sleep(0.2)
    sweep.send_signal(signal.SIGTERM)
    code = sweep.wait(_SECONDS)
    print(json.dumps({"code": code, "said": (folder / "log").read_text()}))
    return 0


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    sys.exit(main(Path(sys.argv[1])))
