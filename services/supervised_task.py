"""Background work that is restarted when it fails, after the failure is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

PAUSE_S = 1.0


async def supervised(name: str, work: Callable[[], Coroutine[Any, Any, None]], *, pause_s: float = PAUSE_S) -> None:
    """Run work until it returns, or this task is cancelled."""
    fields = {"work": name, "retry_in_s": pause_s}
    while True:
        try:
            return await work()
        except (Exception, asyncio.CancelledError) as error:  # the latter may come from a call inside
            task = asyncio.current_task()
            ends = task is None or task.cancelling() > 0
            if not (ends and isinstance(error, asyncio.CancelledError)):
                log.exception("background work failed", extra={"fields": fields})
            if ends:
                raise asyncio.CancelledError from error
        await asyncio.sleep(pause_s)
