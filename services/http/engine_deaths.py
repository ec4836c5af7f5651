"""Engines that die soon after they get one request: the request may be the reason, and gets no more of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.http.connection import ConnectError
from services.logs import log_event

log = logging.getLogger(__name__)

SOON_S = 10.0  # after a request was sent
SUSPECT_AFTER = 2  # engines
POISON = "poison_suspect"  # why no other engine is tried, as metrics name it
DEAD_ENGINE = b"EngineCore"  # what vLLM reports where its engine process has died


@dataclass(slots=True, kw_only=True)
class EngineDeaths:
    """The deaths during one client's request, on all its attempts together."""

    request_id: str
    limit: int  # engines that may die before no other one is tried
    suspected: Callable[[], None]  # is called once
    _instance_ids: list[str] = field(default_factory=list)

    def failed(self, instance_id: str, error: Exception, sent_s: float | None) -> None:
        """Note that the connection to an engine broke; one that could not be reached or is slow has not died."""
        if isinstance(error, ConnectionError) and not isinstance(error, ConnectError):
            self._note(instance_id, sent_s)

    def replied(self, instance_id: str, body: bytes, sent_s: float | None) -> None:
        """Note an engine's error that says that its engine process is dead."""
        if DEAD_ENGINE in body:
            self._note(instance_id, sent_s)

    @property
    def is_exhausted(self) -> bool:
        """Whether no other engine may be tried."""
        return len(self._instance_ids) >= self.limit

    def _note(self, instance_id: str, sent_s: float | None) -> None:
        if sent_s is None or time.monotonic() - sent_s > SOON_S:
            return
        self._instance_ids.append(instance_id)
        if len(self._instance_ids) == SUSPECT_AFTER:
            self.suspected()
        if len(self._instance_ids) >= SUSPECT_AFTER:
            log_event(
                log, logging.WARNING, "engines fail soon after they get this request", request_id=self.request_id,
                instances=",".join(self._instance_ids), limit=self.limit,
            )  # fmt: skip
