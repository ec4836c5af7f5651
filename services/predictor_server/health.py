"""Whether an engine is well: it is asked every so often, and not believed to be while it does not say so."""

from __future__ import annotations

import asyncio
import logging

from services.http.client import HttpClient, Origin, origin_of
from services.logs import log_event

log = logging.getLogger(__name__)

FAILURES = 2  # in a row; one answer may get lost
PATIENCE = 3.0  # intervals that an answer may take


class EngineHealth:
    """Asks the engine's /health; where there is nobody to ask, the engine is taken to be well."""

    def __init__(self, engine_url: str, every_s: float) -> None:
        """Take the engine to be well until it has failed to answer."""
        self._origin = origin_of(engine_url) if engine_url else None
        self._every_s = every_s
        self._num_failures = 0
        self.complaint = ""

    @property
    def is_well(self) -> bool:
        """Tell whether the engine has answered lately."""
        return self._num_failures < FAILURES

    async def watch(self) -> None:
        """Go on asking."""
        if self._origin is None:
            return
        client = HttpClient()
        try:
            while True:
                await self._ask(client, self._origin)
                await asyncio.sleep(self._every_s)
        finally:
            client.close()

    async def _ask(self, client: HttpClient, origin: Origin) -> None:
        try:
            status, _ = await client.get(origin, b"/health", within_s=PATIENCE * self._every_s)
            self.complaint = "" if status == 200 else f"its /health says {status}"
        except (OSError, TimeoutError, ValueError) as error:
            self.complaint = f"its /health fails: {error or type(error).__name__}"
        was_well = self.is_well
        self._num_failures = self._num_failures + 1 if self.complaint else 0
        if was_well and not self.is_well:
            log_event(log, logging.WARNING, "engine is not well", reason=self.complaint)
        elif self.is_well and not was_well:
            log_event(log, logging.INFO, "engine is well again")
