"""The port for operators: /metrics, and the pages that a server adds."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from services.http.application import Application, Call, Endpoint
from services.http.server import answering, listening
from services.security.access import AccessControl

ACCEPT = b"accept"
DRAIN_S = 1.0

Routes = Mapping[str, Mapping[str, Endpoint]]


class OperatorPort(Application):
    """Serves metrics, and more routes."""

    def __init__(self, registry: CollectorRegistry, access: AccessControl | None = None) -> None:
        """Serve the metrics of a registry; `access` checks callers, by default by where they are."""
        super().__init__(access=access or AccessControl(), registry=registry)
        self._registry = registry
        self.routes: Routes = {"/metrics": {"GET": self._metrics}}

    async def _metrics(self, call: Call) -> None:
        await reply_metrics(call, self._registry)


async def reply_metrics(call: Call, registry: CollectorRegistry) -> None:
    """Reply with all metrics, in the format that the caller accepts."""
    encoded, content_type = choose_encoder((call.header(ACCEPT) or b"").decode("latin-1"))
    await call.reply(200, [(b"content-type", content_type.encode())], encoded(registry))


@asynccontextmanager
async def operator_port_served(
    app: OperatorPort, host: str, port: int, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve while the block runs; yield the port."""
    listener = listening(host, port, "metrics_port")
    try:
        async with answering(app, listener, DRAIN_S, tls=tls):
            yield listener.getsockname()[1]
    finally:
        listener.close()
