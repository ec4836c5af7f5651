"""Which instances drain by any of several remote schedulers, for a gateway that moves their requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import grpc

from protos.block.v1 import scheduler_pb2
from services.instances.drains import Drain, drains_in
from services.logs import log_event
from services.rpc.grpc_channel import GrpcChannel
from services.supervised_task import supervised

log = logging.getLogger(__name__)

WATCH = "/block.v1.Scheduler/WatchDrains"
PAUSE_S = 1.0  # before a scheduler is called again
SILENT_S = 15.0  # without a message, after which a scheduler is called again; it repeats its drains every 5 s
KEPT_S = 60.0  # for which the drains of a scheduler that is gone count
SAME_S = 0.25  # by which the times of one drain may differ, as clocks do


class SchedulerDrains:
    """Follows each scheduler, and passes on the drains of all of them together."""

    def __init__(self, channels: Mapping[str, GrpcChannel], take: Callable[[Mapping[str, Drain]], None]) -> None:
        """Follow schedulers by address."""
        self._channels = channels
        self._take = take
        self._by_scheduler: dict[str, Mapping[str, Drain]] = {}
        self._heard_s: dict[str, float] = {}
        self._passed: dict[str, Drain] = {}

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address, channel in self._channels.items():
                tasks.create_task(
                    supervised("drains of a scheduler", lambda a=address, c=channel: self._follow(a, c))  # type: ignore[misc]
                )

    async def _follow(self, address: str, channel: GrpcChannel) -> None:
        request = scheduler_pb2.WatchDrainsRequest().SerializeToString()
        while True:
            start_s = time.monotonic()
            call = asyncio.ensure_future(channel.follow(WATCH, request, lambda raw: self._received(address, raw)))
            try:
                while not call.done() and time.monotonic() - max(start_s, self._heard_s.get(address, 0.0)) < SILENT_S:
                    await asyncio.wait([call], timeout=PAUSE_S)
                if call.done():
                    call.result()
            except (grpc.aio.AioRpcError, ConnectionError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log_event(log, logging.DEBUG, "drains not followed", scheduler=address, reason=reason)
            finally:
                call.cancel()
            await self._pause(address)

    async def _pause(self, address: str) -> None:
        """Wait before the next call; what a scheduler said is forgotten where it is gone for long."""
        await asyncio.sleep(PAUSE_S)
        if self._by_scheduler.get(address) and time.monotonic() - self._heard_s[address] > KEPT_S:
            self._by_scheduler[address] = {}
            self._pass_on()

    def _received(self, address: str, raw: bytes) -> None:
        message = scheduler_pb2.WatchDrainsResponse.FromString(raw)
        self._heard_s[address] = time.monotonic()
        ahead_s = message.now_unix_s - time.time()  # by the scheduler's clock
        drains = {name: drain.shifted(-ahead_s) for name, drain in drains_in(message.instances).items()}
        self._by_scheduler[address] = drains
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass the drains on, where they changed; of two for an instance, that with the earlier deadline counts."""
        merged: dict[str, Drain] = {}
        for drains in self._by_scheduler.values():
            for name, drain in drains.items():
                known = merged.get(name)
                if known is None or drain.deadline_unix_s < known.deadline_unix_s:
                    merged[name] = drain
        for name, drain in merged.items():
            before = self._passed.get(name)
            if before is not None and before.is_close_to(drain, SAME_S):
                merged[name] = before
        if merged != self._passed:
            self._passed = merged
            self._take(merged)
