"""Publishing on Google Cloud Storage, and what its errors mean. gcsfs is imported on use."""

import asyncio
import importlib.util
import logging
import os
import re
from typing import Any

import fsspec

from icl.io import local
from icl.io.errors import MissingObjectError, StoreError, TransientStoreError

CONCURRENCY = 32  # requests at once; each is mostly waiting for an answer
_CONNECT_SECONDS, _SILENCE_SECONDS = 10.0, 60.0
_LOGIN = (
    "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's key "
    "file; on a Google Cloud machine give it a service account."
)
_ROLE = "Give the account {}, as the role Storage Object User (roles/storage.objectUser) on the bucket does."
_PERMISSION = re.compile(r"\bstorage\.\w+\.\w+")
_LATER = "What was saved before is intact; run again later."


def prepare_gcsfs() -> None:
    """What must be so before gcsfs is imported. Raises ImportError, saying what to install, where it is missing."""
    # Otherwise gcsfs asks over gRPC, for minutes where that is closed, what kind of bucket it has.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    if importlib.util.find_spec("gcsfs") is None:
        raise ImportError("gcsfs is not installed; in the clone: pip install -e '.[gcs]'")


def filesystem() -> Any:
    """A gcsfs filesystem without caches and without anonymous fall-back.

    The credentials are Google's application default ones, or what fsspec's own configuration names for `gs`
    (for a public bucket, FSSPEC_GS_TOKEN=anon); with STORAGE_EMULATOR_HOST set there are none.

    Raises: one of `failures()` when there are no credentials.
    """
    import aiohttp
    from gcsfs.core import GCSFileSystem

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)  # it logs tracebacks of what it raises as well
    configured = {**fsspec.config.conf.get("gcs", {}), **fsspec.config.conf.get("gs", {})}
    return GCSFileSystem(
        **{"token": "anon" if os.environ.get("STORAGE_EMULATOR_HOST") else "google_default", **configured},
        use_listings_cache=False,
        # Without it gcsfs waits for ever for an answer that does not come.
        requests_timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS),
    )


def check_bucket(files: Any, root: str) -> None:
    """One request that fails when the bucket, or the permission to look into it, is missing."""
    files.call("GET", "b/{}/o", root.split("/")[0], maxResults=1, fields="kind")


def create(files: Any, path: str, data: bytes) -> bool:
    """One request, which appears whole and fails if the name is taken; the answer's checksum is compared."""
    try:
        files.pipe_file(path, data, mode="create", chunksize=len(data) + 1, consistency="md5")
    except FileExistsError:
        return False
    except OSError as error:
        # An account that may not delete may be told so, instead of that the name is taken.
        if _forbidden(error) is not None and files.exists(path):
            return False
        raise
    return True


def failures() -> tuple[type[Exception], ...]:
    """Every class of exception by which gcsfs says that a storage call failed."""
    import aiohttp
    import gcsfs.retry
    import google.auth.exceptions

    return (
        OSError,
        ValueError,  # some answers with status 400
        asyncio.TimeoutError,
        aiohttp.ClientError,
        google.auth.exceptions.GoogleAuthError,
        gcsfs.retry.HttpError,
        gcsfs.retry.ChecksumError,
        gcsfs.retry.NonRetryableError,
    )


def explain(error: Exception) -> tuple[type[StoreError], str, str]:
    """The class, the reason and the remedy of a failure."""
    import google.auth.exceptions

    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, google.auth.exceptions.DefaultCredentialsError):
        return StoreError, "no Google credentials", _LOGIN
    if isinstance(error, google.auth.exceptions.GoogleAuthError):
        return StoreError, f"credentials that are not accepted ({reason})", _LOGIN
    if isinstance(error, FileNotFoundError):
        return MissingObjectError, "no such bucket or object", "Check the bucket, the store and the run's name."
    forbidden = _forbidden(error)
    if forbidden is not None:
        return StoreError, f"permission denied (403{forbidden and ': '}{forbidden})", _remedy(forbidden)
    code = getattr(error, "code", None)
    if code is not None and str(code) == "401":
        return StoreError, "credentials that are not accepted (401)", _LOGIN
    if code is not None and str(code) not in ("408", "429") and not str(code).startswith("5"):
        return StoreError, f"the answer {code} ({reason})", "Correct the store."
    if code is not None:
        return TransientStoreError, f"the answer {code} from every try ({reason})", _LATER
    if isinstance(error, OSError) and error.errno:
        return local.explain(error)
    if isinstance(error, ValueError):
        return StoreError, f"an answer that makes no sense ({reason})", "Correct the store."
    return TransientStoreError, f"no proper answer from any try ({type(error).__name__}: {reason})", _LATER


def _forbidden(error: Exception) -> str | None:
    """What Google says is forbidden, if that is the failure."""
    first, _, words = str(error).partition("\n")
    return words.strip() if isinstance(error, OSError) and first.startswith("Forbidden") else None


def _remedy(forbidden: str) -> str:
    """A role only where a permission is missing; it is no help against a bucket's retention policy or a hold."""
    permission = _PERMISSION.search(forbidden)
    if forbidden and permission is None:
        return "Ask who keeps the bucket to allow it, or choose another store."
    return _ROLE.format(permission[0] if permission else "the permission")
