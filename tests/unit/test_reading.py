"""A file is damaged when two reads of it agree."""

from collections.abc import Callable

import pytest

from icl.core.families.linear import LinearTask
from icl.core.spec import Spec, TrainingSpec
from icl.io.errors import CheckpointError, TransientStoreError
from icl.io.reading import read_decoded
from icl.io.rundir import RunDir, open_run
from icl.io.store import Store, open_store
from icl.io.verify import verify_run
from tests.trees import METADATA, params, state

SPEC = Spec(task=LinearTask(task_dim=2, num_examples=2), training=TrainingSpec(total_steps=4))


@pytest.fixture
def run(store_url: str) -> RunDir:
    run = open_run(open_store(store_url), SPEC)
    run.save_checkpoint(0, params(SPEC, 0), METADATA)
    for step in (1, 2):
        run.save_state(step, state(SPEC, step), METADATA)
    return run


@pytest.fixture
def misread(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Have the first reads of a path come out wrong, each in its way; returns the paths read."""
    real, reads = Store.read, list[str]()

    def install(path: str, *ways: Callable[[bytes], bytes]) -> list[str]:
        def read(self: Store, at: str, *limit: int) -> bytes:
            seen = reads.count(at)
            reads.append(at)
            data = real(self, at, *limit)
            return ways[seen](data) if at == path and seen < len(ways) else data

        monkeypatch.setattr(Store, "read", read)
        return reads

    return install


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def decode(data: bytes, path: str) -> bytes:
    if data != b"right":
        raise CheckpointError(f"{path}: got {data!r}; expected b'right'.")
    return data


def test_one_bad_read_is_none(store_url: str, misread: Callable[..., list[str]]) -> None:
    store = open_store(store_url)
    store.create("run/a", b"right")
    reads = misread("run/a", flipped)
    assert read_decoded(store, "run/a", decode) == b"right"
    assert reads == ["run/a"] * 2


def test_two_reads_that_agree_are_damage(store_url: str, misread: Callable[..., list[str]]) -> None:
    store = open_store(store_url)
    store.create("run/a", b"wrong")
    reads = misread("run/a")
    with pytest.raises(CheckpointError, match="run/a: got b'wrong'"):
        read_decoded(store, "run/a", decode)
    assert reads == ["run/a"] * 2


def test_two_bad_reads_that_differ_are_the_storage_at_fault(store_url: str, misread: Callable[..., list[str]]) -> None:
    store = open_store(store_url)
    store.create("run/a", b"right")
    misread("run/a", flipped, cut)
    with pytest.raises(TransientStoreError, match="run/a: got other bytes from each of two reads"):
        read_decoded(store, "run/a", decode)


@pytest.mark.parametrize("way", [flipped, cut])
def test_training_goes_on_from_the_newest_state_through_one_bad_read(
    run: RunDir,
    misread: Callable[..., list[str]],
    way: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    misread(run.step_path("state", 2), way)
    found = run.newest_state()
    assert (found and found[0], caplog.text) == (2, "")


def test_a_good_file_is_not_put_aside_for_one_bad_read(run: RunDir, misread: Callable[..., list[str]]) -> None:
    path = run.step_path("checkpoints", 0)
    misread(path, flipped)
    run.save_checkpoint(0, params(SPEC, 0), METADATA)
    assert run.store.list(f"{run.name}/superseded") == []


@pytest.mark.parametrize("file", ["spec.json", "state/step-000000000002.safetensors"])
def test_verify_reports_nothing_for_one_bad_read(run: RunDir, misread: Callable[..., list[str]], file: str) -> None:
    for start in (0, 1):
        run.save_segment(start, start + 1, state(SPEC, 1)["params"][:1], {}, METADATA)
    misread(f"{run.name}/{file}", flipped)
    assert list(verify_run(run)) == []
