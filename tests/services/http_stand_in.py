"""HTTP servers that answer as a test says, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StandInHandler(BaseHTTPRequestHandler):
    """Answers in one piece, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def answer(self, content: bytes) -> None:
        """Send a successful answer."""
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def serving(handler: type[StandInHandler]) -> Iterator[str]:
    """Serve while the block runs; the context value is the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
