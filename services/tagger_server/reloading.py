"""Reloads checkpoints that change while the tagger serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from length_tagger.estimate import Tagger
from services.logs import log_event
from services.supervised_task import supervised

log = logging.getLogger(__name__)

CHECK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A file, how to load it, and what to do with the result."""

    path: str
    load: Callable[[str], Any]
    use: Callable[[Any], None]


def linear_from(path: str) -> Tagger:
    """Load a model of `linear`."""
    from length_tagger.linear import LinearTagger, load

    return LinearTagger(load(path))


@asynccontextmanager
async def reloading(
    watched: Sequence[Watched], registry: CollectorRegistry, check_s: float = CHECK_S
) -> AsyncIterator[None]:
    """Check for changed files while the block runs."""
    reloads = Counter("block_tagger_reloads", "Checkpoints that changed.", ("taken",), registry=registry)
    check = partial(_check, watched, reloads, check_s)
    task = asyncio.create_task(supervised("reloading checkpoints", check)) if watched else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _check(watched: Sequence[Watched], reloads: Counter, check_s: float) -> None:
    seen = [_version(one.path) for one in watched]
    while True:
        await asyncio.sleep(check_s)
        for index, one in enumerate(watched):
            version = _version(one.path)
            if version is None or version == seen[index]:
                continue
            seen[index] = version
            try:
                one.use(await asyncio.to_thread(one.load, one.path))
            except ValueError as error:  # a bad file: the present model stays
                reloads.labels("no").inc()
                log_event(log, logging.WARNING, "checkpoint cannot be loaded", reason=str(error))
            else:
                reloads.labels("yes").inc()
                log_event(log, logging.INFO, "checkpoint loaded", path=one.path)


def _version(path: str) -> tuple[int, int, int] | None:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
