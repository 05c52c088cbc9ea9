"""Attempts: their order is no clock's, and a failure is the latest attempt's or nobody's."""

from typing import Any

import pytest

from icl.io.documents import encode_document
from icl.io.manifest import Manifest
from icl.io.store import open_store

AHEAD, RIGHT = "2099-01-01T02:00:00+00:00", "2026-01-01T00:00:00+00:00"
FAILED = {"status": "failed", "error": "no luck"}


@pytest.fixture
def manifest(store_url: str) -> Manifest:
    return Manifest(open_store(store_url), "run")


def begin(manifest: Manifest, started: str = RIGHT, from_step: int = 0) -> str:
    return manifest.record_attempt({"from_step": from_step, "started": started})


def leave(manifest: Manifest, name: str, info: dict[str, Any]) -> None:
    """A file such as 0.1.0 wrote, which numbered no attempt."""
    manifest.store.create(f"run/attempts/{name}.json", encode_document(info))


def test_attempts_come_in_the_order_in_which_they_began_whatever_their_clocks_say(manifest: Manifest) -> None:
    leave(manifest, "000000000004-aaaaaaaaaaaa", {"from_step": 4, "started": AHEAD})
    for started, step in ((AHEAD, 6), (RIGHT, 2), (RIGHT, 2)):
        begin(manifest, started, step)
    found = [(attempt["from_step"], attempt["started"]) for attempt in manifest.attempts()]
    assert found == [(4, AHEAD), (6, AHEAD), (2, RIGHT), (2, RIGHT)]


@pytest.mark.parametrize("step", [0, 4])
def test_no_failure_outlives_a_later_attempt(manifest: Manifest, step: int) -> None:
    """Of a host whose clock was ahead: the sweep would skip the run for ever."""
    manifest.record_end(begin(manifest, AHEAD, 4), FAILED)
    assert manifest.last_error() == "no luck"
    later = begin(manifest, RIGHT, step)
    assert manifest.last_error() is None
    manifest.record_end(later, FAILED | {"error": "again"})
    assert manifest.last_error() == "again"


@pytest.mark.parametrize("clocks", [(AHEAD, RIGHT), (RIGHT, AHEAD)])
def test_where_the_order_is_not_known_all_must_have_failed(manifest: Manifest, clocks: tuple[str, str]) -> None:
    for letter, started in zip("ab", clocks, strict=True):
        leave(manifest, f"000000000000-{letter * 12}", {"from_step": 0, "started": started})
    leave(manifest, f"000000000000-{'a' * 12}.end", FAILED)
    assert manifest.last_error() is None
    leave(manifest, f"000000000000-{'b' * 12}.end", FAILED)
    assert manifest.last_error() == "no luck"
    leave(manifest, f"000000000001-{'c' * 12}", {"from_step": 1, "started": RIGHT})
    assert manifest.last_error() is None


def test_a_damaged_attempt_fails_no_run(manifest: Manifest, caplog: pytest.LogCaptureFixture) -> None:
    attempt = begin(manifest)
    manifest.store.create(f"run/attempts/{attempt}.end.json", b"{}")
    assert manifest.last_error() is None
    assert f"{attempt}.end.json" in caplog.text
    (found,) = manifest.attempts()
    assert "status" not in found
    manifest.store.create("run/attempts/000000000000-000001-aaaaaaaaaaaa.json", b"{}")
    assert manifest.attempts() == [found]


@pytest.mark.parametrize("damaged", [b"", b"x", b"{}", encode_document({}), encode_document({"step": "3"})])
def test_what_says_complete_and_is_damaged_says_nothing(
    manifest: Manifest, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    manifest.store.create("run/complete.json", damaged)
    assert manifest.status() == "incomplete"
    assert "run/complete.json" in caplog.text
    manifest.mark_complete({"step": 3})
    assert manifest.status() == "complete"
    (aside,) = manifest.store.list("run/superseded")
    assert manifest.store.read(f"run/superseded/{aside}") == damaged
