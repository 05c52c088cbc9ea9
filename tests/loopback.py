"""HTTP servers of the tests, on loopback."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers over connections that stay open, and prints nothing; a subclass says how in `serve`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def serve(self) -> None:
        """Answer the request, whatever its method."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.serve()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> bytes:
        """The body of the request, sent whole or in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def reply(self, status: int, data: bytes, kind: str | None = None, half: bool = False) -> None:
        """Answer, with JSON unless `kind` says otherwise; with `half`, break the connection in the middle."""
        self.send_response(status)
        self.send_header("Content-Type", kind or "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self.hang_up()

    def hang_up(self) -> None:
        """Break the connection."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        pass  # a client that went away


@contextlib.contextmanager
def serving(handler: type[Handler], stopping: threading.Event) -> Iterator[int]:
    """A server that runs while inside, and its port; `stopping` is set before it ends, for answers that wait."""
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        stopping.set()
        server.shutdown()
        server.server_close()


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
