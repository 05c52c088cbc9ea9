"""One place has one form, however it is written; what is no place is refused before anything is made."""

import os
from pathlib import Path

import pytest

from icl.engines.session import session_of
from icl.io.errors import StoreError
from icl.io.location import is_local, resolve_location
from icl.io.store import open_store


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


SPELLINGS = [
    "runs",
    "./runs",
    "runs/",
    "x/../runs",
    "~/runs",
    "link",
    "HERE/runs",
    "file://HERE/runs",
    "local://HERE/runs",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_folder_is_one_place_whoever_opens_it(tmp_path: Path, spelling: str) -> None:
    """What is opened, and what a sweep on this machine is known by."""
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to("runs")
    name = spelling.replace("HERE", str(tmp_path))
    assert resolve_location(name) == os.path.realpath(tmp_path / "runs")
    assert is_local(resolve_location(name))
    assert session_of("some", name) == session_of("some", str(tmp_path / "runs"))
    open_store(name).create("run/a", b"1")
    assert (tmp_path / "runs" / "run" / "a").read_bytes() == b"1"
    assert sorted(os.listdir(tmp_path)) == ["link", "runs", "x"], "and nothing else is made"


@pytest.mark.parametrize(
    ("name", "location"),
    [
        ("gs://bucket/runs/", "gs://bucket/runs"),
        ("gcs://bucket/runs", "gs://bucket/runs"),
        ("memory://x", "memory://x"),
        ("simplecache::gs://bucket", "simplecache::gs://bucket"),
    ],
)
def test_a_url_is_a_place_anywhere(name: str, location: str) -> None:
    assert resolve_location(name) == location
    assert not is_local(location)
    assert resolve_location(location) == location


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("gs:/bucket/runs", "Write scheme://folder for a URL, or ./gs:/bucket/runs for a local folder"),
        ("gs:bucket", "Write scheme://"),
        ("S3:/x", "Write scheme://"),
        ("https:example.org", "Write scheme://"),
        ("simplecache::x", "Write scheme://"),
        ("file:/x", "Write scheme://"),
        ("file://x", "Write file:///folder"),
        ("~no-such-user/runs", "There is no such user"),
        ("", "Correct it"),
        (" ", "Correct it"),
        ("a\0b", "Correct it"),
        ("s4://bucket/x", "Correct it"),
        (" gs://bucket", "Correct it"),
        ("gs://", "Correct it"),
        ("gs:///x", "Correct it"),
    ],
)
def test_what_only_looks_like_a_place_is_refused(tmp_path: Path, name: str, remedy: str) -> None:
    with pytest.raises(StoreError, match=r"store: got .*; expected a local path or an fsspec URL") as raised:
        open_store(name)
    assert remedy in str(raised.value)
    assert os.listdir(tmp_path) == []


def test_a_folder_may_be_called_anything(tmp_path: Path) -> None:
    open_store("./gs:bucket::x").create("run/a", b"1")
    assert (tmp_path / "gs:bucket::x" / "run" / "a").exists()


def test_a_store_inside_a_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "L1H2-M8-s0-bfbc91e9abbef058"
    run.mkdir(parents=True)
    (run / "spec.json").write_text("{}")
    for inside in (run, run / "state", run / "x" / "y"):
        with pytest.raises(
            StoreError, match=f"inside the run {run.name}; expected a folder of its own. Write the store"
        ):
            open_store(str(inside))
    assert sorted(path.name for path in run.iterdir()) == ["spec.json"]
    (tmp_path / "spec.json").write_text("{}")  # a user's, beside the store
    open_store(str(tmp_path / "runs"))


def test_a_store_inside_a_run_is_refused_wherever_it_is(store_url: str) -> None:
    name = "L1H2-M8-s0-bfbc91e9abbef058"
    open_store(store_url).create(f"{name}/spec.json", b"{}")
    for inside in (name, f"{name}/state", f"{name}/x/y"):
        with pytest.raises(StoreError, match=f"inside the run {name}; expected a folder of its own"):
            open_store(f"{store_url}/{inside}")
    assert open_store(store_url).list(name) == ["spec.json"]
    open_store(f"{store_url}/{name}", create=False)  # to read one that was put there
    open_store(f"{store_url}/L1H2-M8-s0-0123456789abcdef/runs")


@pytest.mark.parametrize("name", ["y" * 300, "y/" * 2500], ids=["one part", "many parts"])
def test_a_name_that_is_too_long_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match=r"got file name too long; .* Choose a shorter name\."):
        open_store(f"{tmp_path}/{name}")
