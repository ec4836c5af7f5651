"""Finds out of which kind an engine is, and with which settings it runs, by its HTTP replies."""

from __future__ import annotations

import logging

from predictor.mirror.engine_kinds import AUTO, SGLANG, kind_of
from predictor.mirror.events import EngineIdentified
from predictor.mirror.sglang_metrics import parse_server_info
from services.http.client import HttpClient
from services.http.origin import Origin
from services.logs import log_event

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
MAX_BYTES = 16 * 2**20
STARTING = (502, 503, 504)  # statuses that say nothing about a path
INFO_PATHS = (b"/server_info", b"/get_server_info")  # the second one of older releases
NO_INFO = "SGLang's /server_info cannot be read, so its defaults are assumed"


async def identify(client: HttpClient, origin: Origin, engine_kind: str) -> EngineIdentified:
    """Return the engine's kind, found out where `auto` is given, and its settings; ConnectionError while it starts."""
    kind, replies = engine_kind, _Replies(client, origin)
    info = await replies.server_info() if engine_kind in (AUTO, SGLANG) else None
    failures = tuple(replies.failures)
    if engine_kind == AUTO:
        models, metrics, version = [await replies.body(path) for path in (b"/v1/models", b"/metrics", b"/version")]
        kind = kind_of(models=models, metrics=metrics, version=version, server_info=info)
    if kind != SGLANG:
        return EngineIdentified(kind=kind)
    if info is None and failures:
        raise ConnectionError(failures[0])
    try:
        if info is None:
            raise ValueError("server_info: is not served")
        settings, approximations = parse_server_info(info)
    except ValueError as error:
        log_event(
            log, logging.WARNING, "engine's settings cannot be read, so SGLang's defaults hold", reason=str(error)
        )
        return EngineIdentified(kind=SGLANG, approximations=(NO_INFO,))
    return EngineIdentified(kind=SGLANG, settings=settings, approximations=approximations)


class _Replies:
    """The replies of an engine to a few paths."""

    def __init__(self, client: HttpClient, origin: Origin) -> None:
        self._client, self._origin = client, origin
        self.failures: list[str] = []  # statuses 5xx

    async def server_info(self) -> bytes | None:
        """Return what SGLang says about itself."""
        for path in INFO_PATHS:
            if (body := await self.body(path)) is not None:
                return body
        return None

    async def body(self, path: bytes) -> bytes | None:
        """Return a reply's body; None where the engine does not serve the path, ConnectionError while it starts."""
        status, body = await self._client.get(self._origin, path, within_s=TIMEOUT_S, max_bytes=MAX_BYTES)
        if status >= 500:
            self.failures.append(f"its {path.decode()} returns {status}")
        if status in STARTING:
            raise ConnectionError(self.failures[-1])
        return body if status == 200 else None
