"""What remote schedulers decide, for the gateway's live page: their tails, merged with the gateway's own counters."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager

import grpc
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, scheduler_pb2
from services.logs import log_event
from services.placement.tail_records import COUNTERS, counter_records
from services.rpc.errors import BusyError, UnknownNameError
from services.rpc.grpc_channel import GrpcChannel
from services.supervised_task import supervised

log = logging.getLogger(__name__)

TAIL = "/block.v1.Scheduler/Tail"
EXPLAIN = "/block.v1.Scheduler/Explain"
PAUSE_S = 1.0  # before a scheduler is called again
COUNTERS_S = 1.0
EXPLAIN_S = 2.0
MAX_READERS = 8  # each has a stream of its own to every scheduler
MAX_FRAMES = 64
WHOLE = b'{"reset":true,'  # how the first frame of a scheduler starts


class SlowReaderError(Exception):
    """A reader does not keep up, so that it needs the whole state again."""


class SchedulerTails:
    """Relays the frames of all schedulers to each reader, marked with the scheduler's address."""

    def __init__(self, channels: Mapping[str, GrpcChannel], registry: CollectorRegistry) -> None:
        """Relay from schedulers by address; `registry` has the gateway's counters."""
        self._channels = channels
        self._counters = registry.restricted_registry(COUNTERS)
        self._num_readers = 0

    @contextmanager
    def watched(self) -> Iterator[RelayedReader]:
        """Watch while the block runs."""
        if self._num_readers >= MAX_READERS:
            raise BusyError(f"{MAX_READERS} readers watch already, which is the limit")
        self._num_readers += 1
        reader = RelayedReader(self._channels)
        tasks = [asyncio.create_task(supervised("counters of the live page", lambda: self._count(reader)))]
        tasks += [asyncio.create_task(supervised("tail of a scheduler", one)) for one in reader.relays()]
        try:
            yield reader
        finally:
            self._num_readers -= 1
            for task in tasks:
                task.cancel()

    async def _count(self, reader: RelayedReader) -> None:
        while True:
            counters = counter_records(self._counters.collect())
            reader.put({"from": "gateway", "now": time.time(), "counters": counters})
            await asyncio.sleep(COUNTERS_S)

    async def explain(self, request_id: str) -> common_pb2.Decision:
        """Return the last decision about a request by any scheduler; UnknownNameError where none keeps one."""
        request = scheduler_pb2.ExplainRequest(request_id=request_id)
        replies = await asyncio.gather(
            *(
                channel.call(EXPLAIN, request, scheduler_pb2.ExplainResponse, timeout_s=EXPLAIN_S)
                for channel in self._channels.values()
            ),
            return_exceptions=True,
        )
        found = [reply.decision for reply in replies if isinstance(reply, scheduler_pb2.ExplainResponse)]
        if found:
            return max(found, key=lambda decision: decision.decided_unix_s)
        failed = [one for one in replies if isinstance(one, grpc.aio.AioRpcError)]
        if len(failed) < len(replies):
            raise next(one for one in replies if isinstance(one, BaseException) and one not in failed)
        if all(one.code() is grpc.StatusCode.NOT_FOUND for one in failed):
            raise UnknownNameError(f"request_id: {request_id!r} is not among the last decisions of any scheduler")
        raise ConnectionError("no scheduler replies")


class RelayedReader:
    """The frames of all schedulers, for one reader."""

    def __init__(self, channels: Mapping[str, GrpcChannel]) -> None:
        """Start with an empty state."""
        self._channels = channels
        self._frames: asyncio.Queue[bytes] = asyncio.Queue(MAX_FRAMES)
        self.put({"reset": True, "now": time.time(), "source": f"gateway of {len(channels)} schedulers"})

    def relays(self) -> list[_Relay]:
        """Return what follows each scheduler until it is cancelled."""
        return [_Relay(address, channel, self) for address, channel in self._channels.items()]

    def put(self, frame: Mapping[str, object]) -> None:
        """Add a frame of the gateway's own, unless the reader is behind."""
        if not self._frames.full():
            self._frames.put_nowait(json.dumps(frame, separators=(",", ":"), allow_nan=False).encode())

    def relay(self, address: str, frame: bytes) -> None:
        """Add a frame of a scheduler; SlowReaderError where the reader is behind."""
        if self._frames.full():
            raise SlowReaderError
        sender = json.dumps({"from": address}).encode()[:-1]
        if frame.startswith(WHOLE):  # of this scheduler, not of all
            self._frames.put_nowait(sender + b',"all":true,' + frame[len(WHOLE) :])
        else:
            self._frames.put_nowait(sender + b"," + frame[1:])

    async def frames(self) -> AsyncGenerator[bytes]:
        """Yield frames until the caller stops."""
        while True:
            yield await self._frames.get()


class _Relay:
    """Follows one scheduler for one reader; connects again when the stream ends."""

    def __init__(self, address: str, channel: GrpcChannel, reader: RelayedReader) -> None:
        self._address, self._channel, self._reader = address, channel, reader

    async def __call__(self) -> None:
        request = scheduler_pb2.TailRequest().SerializeToString()
        while True:
            try:
                await self._channel.follow(TAIL, request, self._take)
            except (grpc.aio.AioRpcError, ConnectionError, SlowReaderError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
                log_event(log, logging.DEBUG, "tail ended", scheduler=self._address, reason=reason)
            await asyncio.sleep(PAUSE_S)

    def _take(self, raw: bytes) -> None:
        self._reader.relay(self._address, scheduler_pb2.TailResponse.FromString(raw).frame_json)
