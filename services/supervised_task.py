"""Work in the background that is to last: what it did not foresee is told with a traceback, and it is begun again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

PAUSE_S = 1.0


async def supervised(what: str, work: Callable[[], Coroutine[Any, Any, None]], *, pause_s: float = PAUSE_S) -> None:
    """Do the work until it ends by itself, or whoever runs this cancels it."""
    fields = {"work": what, "again_in_s": pause_s}
    while True:
        try:
            return await work()
        except (Exception, asyncio.CancelledError) as error:  # the latter also where a call was cancelled underneath
            task = asyncio.current_task()
            ends = task is None or task.cancelling() > 0
            if not (ends and isinstance(error, asyncio.CancelledError)):
                log.exception("failed", extra={"fields": fields})
            if ends:
                raise asyncio.CancelledError from error
        await asyncio.sleep(pause_s)
