"""Servers that shut down: requests that were accepted before are served, until the time to drain is over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from services.http.application import JSON, Application, Call, Endpoint


class OnePage(Application):
    """Serves one page, as a call that counts."""

    def __init__(self) -> None:
        """Serve without limits."""
        super().__init__()
        self.routes: Mapping[str, Mapping[str, Endpoint]] = {"/": {"GET": self._serve}}

    async def _serve(self, call: Call) -> None:
        with self.admitted():
            await call.reply(200, JSON, b"{}")


def status_of_a_request(app: Application) -> int:
    """Let the application serve a request; return the status of its reply."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope: Any = {"type": "http", "path": "/", "raw_path": b"/", "method": "GET", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])


def test_a_request_that_arrives_while_the_server_drains_is_served() -> None:
    """Its connection was accepted before, and its client would have to send it again for nothing."""
    app = OnePage()
    app.draining = True
    assert status_of_a_request(app) == 200


def test_a_request_that_arrives_after_the_time_to_drain_is_refused() -> None:
    """The server would not wait for it."""
    app = OnePage()
    app.draining = True
    app.cut_off()
    assert status_of_a_request(app) == 503
