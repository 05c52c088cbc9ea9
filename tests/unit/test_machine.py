"""What a machine allows, read from control groups laid out as Linux does."""

import os
import sys
from pathlib import Path

import pytest

from icl import machine


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def lay(root: Path, membership: str, **files: str) -> None:
    (root / "membership").write_text(membership)
    for path, text in files.items():
        file = root / "cgroup" / path.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_without_groups_affinity_and_memory_count(cgroups: Path) -> None:
    assert machine.allowed_cores() == 8
    assert machine.allowed_memory() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("own", "parent", "cores"),
    [("max 100000", "max 100000", 8), ("150000 100000", "max 100000", 2), ("400000 100000", "100000 100000", 1)],
)
def test_the_least_quota_on_the_way_up_counts(cgroups: Path, own: str, parent: str, cores: int) -> None:
    lay(cgroups, "0::/job/step\n", job__step__cpu_dot_max=own, job__cpu_dot_max=parent)
    assert machine.allowed_cores() == cores


def test_a_container_sees_its_own_group_at_the_mount(cgroups: Path) -> None:
    lay(cgroups, "0::/docker/0123\n", cpu_dot_max="300000 100000", memory_dot_max="1000000")
    assert (machine.allowed_cores(), machine.allowed_memory()) == (3, 1_000_000)


def test_version_1(cgroups: Path) -> None:
    lay(
        cgroups,
        "4:memory:/job\n1:cpu,cpuacct:/job\n",
        cpu__job__cpu_dot_cfs_quota_us="250000\n",
        cpu__job__cpu_dot_cfs_period_us="100000\n",
        memory__job__memory_dot_limit_in_bytes="123456\n",
    )
    assert (machine.allowed_cores(), machine.allowed_memory()) == (3, 123_456)


def test_no_quota_is_minus_one_in_version_1(cgroups: Path) -> None:
    lay(cgroups, "1:cpu:/\n", cpu__cpu_dot_cfs_quota_us="-1\n", cpu__cpu_dot_cfs_period_us="100000\n")
    assert machine.allowed_cores() == 8


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("vendor_id\t: X\ncpu family\t: 6\nmodel\t: 143\nflags\t: pti fma avx2\n\nprocessor: 1\nmodel\t: 9\n", "avx2"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\nFeatures\t: asimd sve\n", "sve"),
    ],
    ids=["x86", "arm"],
)
def test_a_processor_is_its_kind_and_its_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, changed: str
) -> None:
    def told(said: str) -> str:
        (tmp_path / "cpuinfo").write_text(said)
        monkeypatch.setattr(machine, "_PROCESSORS", tmp_path / "cpuinfo")
        return machine.processor()

    assert told(text).startswith(("X 6 143 ", "0x41 0xd40 "))
    assert told(text) == told(text.replace("processor\t: 0", "processor\t: 7").replace("model\t: 9", "model\t: 3"))
    assert told(text) == told(text.replace("pti ", ""))
    assert told(text) != told(text.replace(changed, ""))


def test_a_processor_without_a_file_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PROCESSORS", tmp_path / "none")
    assert machine.processor()


def test_threads_spin_briefly_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    machine.limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ  # PyTorch is loaded: it would count for nothing, and say that it does
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    machine.limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    machine.limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == machine.SPIN_COUNT
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    machine.limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
