"""A sweep on a Ray cluster of two worker nodes, one of which dies.

`unshare --user --map-root-user --net python -m tests.faults.ray_nodes FOLDER`, so that nothing can leave this machine:
the network namespace has a loopback interface and no other. FOLDER holds a sweep.json; the store is made in it.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from icl.io.manifest import Manifest
from icl.io.store import open_store
from icl.io.sweepfile import load_sweep

_SECONDS = 300.0
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def raise_loopback() -> None:
    """Bring up the one interface of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        name, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", name, flags | _UP))


def main(folder: Path) -> int:
    """Run the sweep, kill a node once both have begun, and print where attempts were made."""
    raise_loopback()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    command = [sys.executable, "-m", "icl.sweep", str(folder / "sweep.json"), "--store", str(folder / "store")]
    sweep = subprocess.Popen([*command, "--engine", "ray", "--ray-address", cluster.address])
    deadline = time.monotonic() + _SECONDS
    while len(working_nodes(folder)) < 2:
        assert time.monotonic() < deadline, "the nodes do not begin"
        assert sweep.poll() is None, "the sweep has ended too early"
        time.sleep(0.2)
    cluster.remove_node(nodes[0], allow_graceful=False)
    code = sweep.wait(deadline - time.monotonic())
    print(json.dumps({"code": code, "attempts": working_nodes(folder), "died": nodes[0].node_id}))
    cluster.shutdown()  # type: ignore[no-untyped-call]
    return code


def working_nodes(folder: Path) -> dict[str, int]:
    """How many attempts each node has made."""
    store = open_store(str(folder / "store"))
    names = [member.name for member in load_sweep(folder / "sweep.json").members]
    attempts = [attempt for name in names for attempt in Manifest(store, name).attempts()]
    return Counter(attempt["environment"]["ICL_WORKER"].removeprefix("ray node ") for attempt in attempts)


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    sys.exit(main(Path(sys.argv[1])))
