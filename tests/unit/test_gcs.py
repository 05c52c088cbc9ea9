"""Google Cloud Storage: what is set up, what is asked, and what a user is told when it fails. Against the emulator."""

import os
import subprocess
import sys

import pytest

from icl.io import gcs as gcs_module
from icl.io.errors import MissingObjectError, StoreError, TransientStoreError
from icl.io.store import open_store
from tests.emulator import BUCKET, Emulator, Proxy, Request

URL = f"gs://{BUCKET}/faults"


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """One second of silence is too much, but only where requests stall: the emulator itself may be as slow as that."""
    if fault == "stall":
        monkeypatch.setattr(gcs_module, "_SILENCE_SECONDS", 1.0)


def test_without_credentials_it_is_said_and_nothing_is_tried_anonymously(
    monkeypatch: pytest.MonkeyPatch, gcs_proxy: Proxy
) -> None:
    import google.auth
    import google.auth.exceptions

    def refuse(**_: object) -> None:
        raise google.auth.exceptions.DefaultCredentialsError("none")  # type: ignore[no-untyped-call]

    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    monkeypatch.setattr(google.auth, "default", refuse)
    with pytest.raises(StoreError, match=r"got no Google credentials; .*gcloud auth application-default login"):
        open_store(URL)


def test_a_bucket_that_is_not_there_is_named(gcs: Emulator) -> None:
    with pytest.raises(MissingObjectError, match=r"gs://absent/x/\.: got no such bucket or object; .*Check the bucket"):
        open_store("gs://absent/x")


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("401", StoreError, r"credentials that are not accepted .*gcloud auth"),
        ("403", StoreError, r"permission denied \(403: by order\); .*Ask who keeps the bucket"),
        ("400", StoreError, r"the answer 400 \(by order"),
        ("429", TransientStoreError, r"the answer 429 from every try \(by order.*run again later"),
        ("503", TransientStoreError, r"the answer 503 from every try"),
        ("before", TransientStoreError, r"no proper answer from any try \(ServerDisconnectedError"),
        ("stall", TransientStoreError, r"no proper answer from any try \(.*[Tt]imeout"),
    ],
)
def test_a_failure_that_lasts_is_one_clear_error(
    gcs_proxy: Proxy, fault: str, kind: type[StoreError], message: str
) -> None:
    """Field fault 68, for good."""
    store = open_store(URL)
    gcs_proxy.fault = lambda request: fault
    with pytest.raises(StoreError, match=rf"{URL}/run/a: got {message}") as raised:
        store.create("run/a", b"1")
    assert type(raised.value) is kind
    with pytest.raises(StoreError, match="expected a usable store"):
        open_store(URL)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("fault", ["429", "503", "408", "before", "after", "half", "stall"])
def test_a_failure_that_passes_is_not_noticed(gcs_proxy: Proxy, fault: str) -> None:
    """Field fault 68: twice a failure, then an answer; a lost answer to a creation is found to be ours."""
    store = open_store(f"{URL}-{fault}")
    left: list[str] = []
    gcs_proxy.fault = lambda request: left.pop() if left else None
    left[:] = [fault] * 2
    created = store.create("run/a", b"1" * 1000)
    tries = [request.call for request in gcs_proxy.requests].count("create")
    assert created == (fault != "after") or (fault == "stall" and tries > 3)  # a slow emulator's answer came too late
    left[:] = [fault] * 2
    assert store.read("run/a") == b"1" * 1000
    left[:] = [fault] * 2
    assert store.list("run") == ["a"]
    left[:] = [fault] * 2
    store.delete("run/a")
    assert store.list("run") == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "me@icl does not have storage.objects.create access to the Google Cloud Storage object.",
            "Give the account storage.objects.create, as the role Storage Object User (roles/storage.objectUser)",
        ),
        ("", "Give the account the permission, as the role Storage Object User"),
        ("Object 'a' is subject to bucket's retention policy and cannot be deleted", "Ask who keeps the bucket"),
    ],
)
def test_a_role_is_named_only_where_a_permission_is_missing(words: str, told: str) -> None:
    """As gcsfs passes on what Google says."""
    kind, reason, remedy = gcs_module.explain(OSError(f"Forbidden: b/o\n{words}"))
    assert kind is StoreError
    assert reason == (f"permission denied (403: {words})" if words else "permission denied (403)")
    assert remedy.startswith(told)


def test_a_name_that_is_taken_is_no_missing_permission(gcs_proxy: Proxy) -> None:
    """An account that may create but not overwrite may be told either."""
    store = open_store(f"{URL}/taken")
    assert store.create("run/a", b"1")
    gcs_proxy.fault = lambda request: "403" if request.call == "create" else None
    assert not store.create("run/a", b"2")
    with pytest.raises(StoreError, match="permission denied"):
        store.create("run/b", b"2")


def test_a_listing_goes_beyond_one_page(gcs_proxy: Proxy) -> None:
    """Field fault 75: a thousand names in one answer, as Google's own; order by number."""
    store = open_store(f"{URL}/pages")
    names = [f"{number:012d}" for number in range(2100)]
    list(store.map(lambda name: store.create(f"run/{name}", b""), names))
    gcs_proxy.requests.clear()
    assert store.list("run") == names
    assert [request.call for request in gcs_proxy.requests] == ["list"] * 3


def test_a_creation_is_one_request_and_a_reading_another(gcs_proxy: Proxy) -> None:
    store = open_store(f"{URL}/calls")
    gcs_proxy.requests.clear()
    store.create("run/a", bytes(60 * 2**20))  # beyond what gcsfs sends in pieces, which would not be exclusive
    store.read("run/a", 60 * 2**20)
    assert [request.call for request in gcs_proxy.requests] == ["create", "read"]


def test_a_torn_upload_publishes_nothing(gcs_proxy: Proxy) -> None:
    """Field fault 73: the connection breaks in the middle of the bytes, every time."""
    store = open_store(f"{URL}/torn")
    gcs_proxy.fault = lambda request: "half" if request.call == "create" else None
    with pytest.raises(TransientStoreError):
        store.create("run/a", b"x" * 300_000)
    gcs_proxy.fault = lambda request: None
    assert store.list("run") == []


def test_folder_markers_are_not_objects(gcs: Emulator) -> None:
    """What the web console leaves behind when somebody makes a folder there."""
    import gcsfs

    store = open_store(f"{URL}/marked")
    store.create("run/a", b"1")
    files = gcsfs.core.GCSFileSystem(token="anon", use_listings_cache=False)
    files.pipe_file(f"{BUCKET}/faults/marked/run/", b"")
    assert store.list("run") == ["a"]
    assert store.list() == ["run"]


def test_gcsfs_is_imported_only_for_a_bucket_and_its_absence_is_said() -> None:
    script = """
import sys
from icl.io.store import open_store
from icl.io.errors import StoreError
open_store("memory://x")
assert not {"gcsfs", "aiohttp", "google.auth"} & sys.modules.keys()
import importlib.util
importlib.util.find_spec = lambda name: None
try:
    open_store("gs://bucket/x")
except StoreError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert told.startswith("store: got 'gs://bucket/x' (gcsfs is not installed; in the clone: pip install -e '.[gcs]')")


def test_requests_are_told_apart() -> None:
    assert Request("POST", "/upload/storage/v1/b/b/o?ifGenerationMatch=0").call == "create"
    assert Request("POST", "/upload/storage/v1/b/b/o?uploadType=multipart").call == "replace"
    assert Request("GET", "/download/storage/v1/b/b/o/x?alt=media").call == "read"


def test_gcsfs_is_imported_without_its_grpc_part(gcs: Emulator) -> None:
    """In a fresh process: it decides when it is imported, and asking over gRPC takes minutes where that is shut."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GCSFS_")}
    code = f"import icl, sys; icl.list_runs('gs://{BUCKET}/x'); print('gcsfs.extended_gcsfs' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    assert done.stdout == "False\n", done.stderr
