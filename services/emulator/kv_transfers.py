"""KV blocks between emulated engines: which are held here for others, and which are fetched from others.

The engine model says how long a fetch takes and when a lease ends; this says whether the other engine is still there.
A request whose blocks are lost before they have been fetched fails, or computes its prompt here, as in vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from predictor.config import RECOMPUTE, EngineConfig
from services.emulator.side_channel import (
    BlocksOfPrefill,
    SideChannel,
    SideChannelClient,
    TransferError,
    Watch,
    compatibility_hash,
)
from services.emulator.transfer_params import RemoteBlocks, held_params
from services.logs import log_event

log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 6
EXTENSION = 2 / 3  # of the lease, by each heartbeat
MAX_NOTIFICATIONS = 1024  # under way; without further ones the leases end


@dataclass(slots=True, eq=False)
class Fetch:
    """A request whose blocks another engine holds until `is_freed`; `started_s` is on the engine's clock."""

    remote: RemoteBlocks
    watch: Watch
    started_s: float | None = None
    is_lost: bool = False
    is_freed: bool = False
    watching: asyncio.Task[None] | None = None


@dataclass(slots=True, kw_only=True)
class TransferCounts:
    """What a NIXL connector counts, on both sides; late notifications come after the lease's end."""

    num_failed_transfers: int = 0
    num_failed_notifications: int = 0
    num_expired: int = 0
    num_late_notifications: int = 0


class Leases:
    """The blocks of finished prefills that are held here, by the ids of their requests.

    `on_extended` and `on_released` are called with such an id when the other engine says so.
    """

    def __init__(self, counts: TransferCounts) -> None:
        """Hold nothing yet."""
        self.engine_id = str(uuid4())
        self.on_extended: Callable[[str], None] = lambda _: None
        self.on_released: Callable[[str], None] = lambda _: None
        self._counts = counts
        self._endings: dict[str, asyncio.Event] = {}

    def __len__(self) -> int:
        """Return the number of requests whose blocks are held."""
        return len(self._endings)

    def __contains__(self, request_id: str) -> bool:
        """Return whether blocks of a request are held."""
        return request_id in self._endings

    def add(self, request_id: str) -> None:
        """Hold the blocks of a request."""
        self._endings[request_id] = asyncio.Event()

    def expire(self, request_id: str) -> None:
        """End a lease that has run out, as it was not extended."""
        self._end(request_id)
        self._counts.num_expired += 1
        log_event(log, logging.WARNING, "held KV blocks expired", request_id=request_id)

    def side(self, compatibility: str) -> BlocksOfPrefill:
        """Return what the side channel may do."""
        return BlocksOfPrefill(
            engine_id=self.engine_id,
            compatibility=compatibility,
            ending=self._endings.get,
            extend=self._on_heartbeat,
            release=self._on_done,
        )

    def _on_heartbeat(self, request_id: str) -> None:
        if request_id in self._endings:
            self.on_extended(request_id)

    def _on_done(self, request_id: str) -> None:
        if request_id not in self._endings:
            self._counts.num_late_notifications += 1
            return
        self._end(request_id)
        self.on_released(request_id)

    def _end(self, request_id: str) -> None:
        self._endings.pop(request_id).set()


class Fetches:
    """The blocks that are fetched from other engines, by the ids of the requests here.

    `on_lost` is called with such an id when the other engine does not hold the blocks any more.
    """

    def __init__(self, counts: TransferCounts, client: SideChannelClient, *, lease_s: float) -> None:
        """Fetch nothing yet; `lease_s` is on the wall clock."""
        self._counts = counts
        self._client = client
        self._interval_s = lease_s / HEARTBEATS_PER_LEASE
        self._fetches: dict[str, Fetch] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._last_beat_s = -self._interval_s
        self.on_lost: Callable[[str], None] = lambda _: None

    def __len__(self) -> int:
        """Return the number of requests that other engines hold blocks for."""
        return len(self._fetches)

    async def open(self, remote: RemoteBlocks) -> Fetch:
        """Have another engine confirm that it holds blocks; TransferError where it does not."""
        try:
            return Fetch(remote, await self._client.watch(remote))
        except TransferError as error:
            self._failed(remote, str(error))
            raise

    def begin(self, request_id: str, fetch: Fetch) -> None:
        """Extend the lease of the blocks of a request, which the engine has now, until its fetch ends."""
        self._fetches[request_id] = fetch
        fetch.watching = asyncio.create_task(self._wait_until_lost(request_id, fetch))
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())

    def all(self) -> list[tuple[str, Fetch]]:
        """Return all that have not ended."""
        return list(self._fetches.items())

    def end(self, request_id: str) -> None:
        """End a fetch: its blocks have been fetched, or are not needed."""
        self.discard(self._fetches.pop(request_id))

    def fail(self, request_id: str) -> None:
        """End a fetch whose blocks are lost."""
        fetch = self._fetches.pop(request_id)
        self._failed(fetch.remote, "the blocks were lost")
        self._close(fetch)

    def discard(self, fetch: Fetch) -> None:
        """Let the other engine free the blocks of a fetch, if it has not yet; they are not needed any more."""
        if not fetch.is_freed:
            fetch.is_freed = True
            self.free(fetch.remote)
            self._close(fetch)

    def free(self, remote: RemoteBlocks) -> None:
        """Let another engine free blocks; where that fails their lease ends."""
        if len(self._tasks) < MAX_NOTIFICATIONS:
            self._start(self._notify(remote))

    def close(self) -> None:
        """End all fetches and notifications."""
        for fetch in self._fetches.values():
            self._close(fetch)
        self._fetches.clear()
        for task in (*self._tasks, *([self._beating] if self._beating else [])):
            task.cancel()
        self._client.close()

    def _close(self, fetch: Fetch) -> None:
        if fetch.watching is not None:
            fetch.watching.cancel()
        fetch.watch.close()

    def _failed(self, remote: RemoteBlocks, reason: str) -> None:
        self._counts.num_failed_transfers += 1
        log_event(
            log, logging.WARNING, "KV blocks cannot be fetched", host=remote.host, port=remote.port,
            request_id=remote.request_id, reason=reason,
        )  # fmt: skip

    async def _wait_until_lost(self, request_id: str, fetch: Fetch) -> None:
        await fetch.watch.lost()
        fetch.is_lost = True
        self.on_lost(request_id)

    async def _notify(self, remote: RemoteBlocks) -> None:
        try:
            await self._client.done(remote)
        except TransferError as error:
            self._counts.num_failed_notifications += 1
            self._counts.num_failed_transfers += 1  # of all kinds
            log_event(
                log, logging.WARNING, "KV blocks cannot be freed", request_id=remote.request_id, reason=str(error)
            )

    async def _beat(self) -> None:
        """Extend the leases of all blocks, at once and then at every interval, while there are any."""
        while self._fetches:
            await asyncio.sleep(self._last_beat_s + self._interval_s - time.monotonic())
            self._last_beat_s = time.monotonic()
            by_engine: dict[str, list[RemoteBlocks]] = {}
            for fetch in self._fetches.values():
                if not fetch.is_freed:
                    by_engine.setdefault(fetch.remote.engine_id, []).append(fetch.remote)
            for remotes in by_engine.values():
                self._start(self._extend(remotes))

    async def _extend(self, remotes: list[RemoteBlocks]) -> None:
        with suppress(TransferError):  # the next one may arrive
            await self._client.heartbeat(remotes[0], [one.request_id for one in remotes])

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class EmulatedConnector:
    """An engine's part in disaggregated prefill and decode: what it holds, what it fetches, and its side channel."""

    def __init__(self, config: EngineConfig, model: str, version: str, *, host: str, port: int) -> None:
        """Serve at an address; the lease of the configuration is on the wall clock."""
        self.host, self.port = host, port
        self.extension_s = config.kv_lease_s * EXTENSION
        self.recomputes = config.kv_load_failure_policy == RECOMPUTE
        self.counts = TransferCounts()
        compatibility = compatibility_hash(model, version, config)
        self.leases = Leases(self.counts)
        self.fetches = Fetches(self.counts, SideChannelClient(compatibility), lease_s=config.kv_lease_s)
        self.side_channel = SideChannel(self.leases.side(compatibility))

    def reply_params(
        self, request_id: str, *, block_ids: Sequence[int], num_tokens: int, cached_tokens: int
    ) -> dict[str, Any]:
        """Hold the blocks of a finished prefill, and return what its reply says about them."""
        self.leases.add(request_id)
        return held_params(
            engine_id=self.leases.engine_id, request_id=request_id, host=self.host, port=self.port,
            block_ids=block_ids, num_tokens=num_tokens, cached_tokens=cached_tokens,
        )  # fmt: skip
