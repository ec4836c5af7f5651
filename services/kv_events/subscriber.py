"""Follows an engine's KV events: receives them, repairs gaps by the engine's replay, and notices lost connections."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from predictor.kv_events.index import KvEventIndex
from predictor.kv_events.stream import COMPLETE, UNSURE, KvEventStream
from scheduler.prefix.kv_block_hash import next_block_hash
from services.engine_state.identity import short_hash
from services.kv_events.metrics import KvEventMetrics
from services.kv_events.settings import KvEventSettings
from services.kv_events.wire import END_OF_REPLAY, MAX_FRAME_BYTES, SEQUENCE_BYTES, batch_from, sequence_of
from services.logs import log_event
from services.supervised_task import supervised

log = logging.getLogger(__name__)

HIGH_WATER_MARK = 100_000  # batches that wait to be read, as many as vLLM keeps for a slow subscriber
REPLAY_TIMEOUT_S = 5.0  # between two batches of a replay
MAX_REPLAYED = 100_000  # batches of one replay
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # before another attempt to get a replay
FUTILE_REPLAYS = 3  # in a row, after which live batches are used without one
LOG_S = 10.0  # from one line about invalid batches to the next
CONNECTED, DISCONNECTED = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED
ABSENT_S = 5.0  # without a connection, before it is logged


def stream_of(settings: KvEventSettings) -> KvEventStream:
    """Return an empty index, behind the stream of an engine's events."""
    index = KvEventIndex(partial(next_block_hash, seed=settings.hash_seed), short_hash)
    return KvEventStream(index, can_replay=bool(settings.replay_endpoint))


class KvEventSubscriber:
    """Receives the events of one engine within one event loop, and applies them to a stream."""

    def __init__(self, settings: KvEventSettings, stream: KvEventStream, metrics: KvEventMetrics) -> None:
        """Follow the events at the settings' endpoints; `run` starts it."""
        self.stream = stream
        self._settings = settings
        self._metrics = metrics
        self._rank: int | None = None
        self._changed = asyncio.Event()
        self._activity_s = time.monotonic()  # of the last batch, or change of the connection
        self._checked_s = 0.0
        self._num_futile = 0
        self._logged_s: dict[str, float] = {}
        self._state = ""

    async def run(self) -> None:
        """Follow the events until cancelled."""
        self._changed.set()  # the engine may have published something before
        context = zmq.asyncio.Context()
        try:
            await self._follow(context)
        finally:
            context.destroy(linger=0)

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        socket = context.socket(zmq.SUB)
        socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.RECONNECT_IVL_MAX, 2000)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        monitor = socket.get_monitor_socket(CONNECTED | DISCONNECTED)
        socket.subscribe(b"")  # other topics are noticed
        socket.connect(self._settings.endpoint)
        tasks = [
            asyncio.create_task(self._receive(socket)),
            asyncio.create_task(self._watch_connection(monitor)),
            asyncio.create_task(self._repair(context)),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.disable_monitor()

    # Live batches.

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._take(await socket.recv_multipart())
            self._activity_s = time.monotonic()
            self._note_change()

    def _take(self, frames: list[bytes], *, is_replay: bool = False) -> None:
        """Read the frames of a batch: topic, sequence number, payload."""
        try:
            if len(frames) != 3:
                raise ValueError(f"frames: are {len(frames)}, not topic, sequence and payload")
            topic, number, payload = frames
            if not topic.startswith(self._settings.topic.encode()):
                name = topic.decode(errors="replace")
                self._refuse("other_topic", f"topic: {name!r} is not {self._settings.topic!r}")
                return
            sequence = sequence_of(number)
            batch, num_unknown = batch_from(payload)
            if sequence < 0:
                raise ValueError(f"sequence: {sequence} is below 0")
        except ValueError as error:
            self._refuse("invalid", str(error))
            return
        if self._rank is None:
            self._rank = batch.rank
        if batch.rank != self._rank:
            self._refuse("other_rank", f"data_parallel_rank: {batch.rank} is not {self._rank}, as in the first batch")
            return
        if num_unknown:
            self._metrics.count_unknown(num_unknown)
        if is_replay:
            self.stream.replay(sequence, batch)
        else:
            self._metrics.set_lag(time.time() - batch.published_s)
            self.stream.receive(sequence, batch)

    def _refuse(self, result: str, reason: str) -> None:
        """Count a batch that is not used, and log it unless that was logged just now."""
        self._metrics.count(result)
        now_s = time.monotonic()
        if now_s - self._logged_s.get(result, -LOG_S) >= LOG_S:
            self._logged_s[result] = now_s
            log_event(log, logging.WARNING, "KV events are ignored", endpoint=self._settings.endpoint, reason=reason)

    # The connection.

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        """Take lost and new connections to the publisher."""
        is_absent, is_logged = True, False
        while True:
            try:
                async with asyncio.timeout(ABSENT_S if is_absent and not is_logged else None):
                    event = (await recv_monitor_message(monitor))["event"]
            except TimeoutError:
                is_logged = True
                log_event(
                    log, logging.WARNING, "no KV events: nothing publishes at this endpoint",
                    endpoint=self._settings.endpoint,
                )  # fmt: skip
                continue
            if event == DISCONNECTED:
                self.stream.disconnect()
                self._num_futile = 0
                is_absent = True
            else:
                is_absent = is_logged = False
            self._activity_s = time.monotonic()
            self._note_change()

    def _note_change(self) -> None:
        """Wake the repairs, and log changes of what is known."""
        self._metrics.update()
        if self.stream.needs_replay or self.stream.has_gap:
            self._changed.set()
        if (state := self.stream.certainty) == self._state:
            return
        was_known, self._state = bool(self._state), state
        level = logging.INFO if state == COMPLETE or not was_known else logging.WARNING
        if state != UNSURE or not self.stream.has_gap:  # most gaps are repaired within milliseconds
            log_event(
                log, level, "prefix cache is known from KV events", endpoint=self._settings.endpoint, state=state,
                blocks=self.stream.index.num_blocks,
            )  # fmt: skip

    # Repairs.

    async def _repair(self, context: zmq.asyncio.Context) -> None:
        """Ask for what is missing at once, and for the last batches again whenever it is quiet."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.check_s):
                    await self._changed.wait()
            self._changed.clear()
            if not self._settings.replay_endpoint:
                await self._wait_for_late()
            elif self.stream.needs_replay or self._is_due():
                await self._replay_until_known(context)

    def _is_due(self) -> bool:
        """Return whether nothing has come for a while: the last batches may be lost, or the engine replaced."""
        return time.monotonic() - max(self._checked_s, self._activity_s) >= self._settings.check_s

    async def _wait_for_late(self) -> None:
        """Without replays, batches that come late close a gap, or nothing does."""
        if not self.stream.has_gap:
            return
        await asyncio.sleep(self._settings.gap_s)
        if self.stream.has_gap:
            self._give_up()

    async def _replay_until_known(self, context: zmq.asyncio.Context) -> None:
        while True:
            try:
                is_needed = await self._replay(context)
                self._num_futile, self._checked_s = 0, time.monotonic()
            except (TimeoutError, ValueError) as error:
                self.stream.cancel_replay()
                if self._num_futile == 0:
                    log_event(
                        log, logging.WARNING, "KV events cannot be replayed",
                        endpoint=self._settings.replay_endpoint, reason=str(error) or "no reply in time",
                    )  # fmt: skip
                is_needed = True
                self._num_futile += 1
                if self._num_futile >= FUTILE_REPLAYS and self.stream.has_gap:
                    self._give_up()
                    return
                await asyncio.sleep(RETRY_S[min(self._num_futile, len(RETRY_S)) - 1])
            self._note_change()
            if not is_needed and not self.stream.needs_replay:
                return

    def _give_up(self) -> None:
        log_event(
            log, logging.WARNING, "KV events are lost: prefix hits are known in part", endpoint=self._settings.endpoint
        )
        self.stream.give_up()
        self._note_change()

    async def _replay(self, context: zmq.asyncio.Context) -> bool:
        """Get a replay; return whether another one is needed. TimeoutError where the engine does not reply."""
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        try:
            socket.connect(self._settings.replay_endpoint)
            start = self.stream.replay_from()
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")])
            for _ in range(MAX_REPLAYED + 1):
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    _, *frames = await socket.recv_multipart()
                if len(frames) != 3:
                    raise ValueError(f"the reply has {len(frames) + 1} frames")
                if frames[1] == END_OF_REPLAY:
                    return self.stream.end_replay()
                self._take(frames, is_replay=True)
            raise ValueError(f"the reply has more than {MAX_REPLAYED} batches")
        finally:
            socket.close(linger=0)


@asynccontextmanager
async def subscribed(
    settings: KvEventSettings, stream: KvEventStream, metrics: KvEventMetrics
) -> AsyncIterator[KvEventSubscriber]:
    """Follow an engine's events while the block runs."""
    subscriber = KvEventSubscriber(settings, stream, metrics)
    task = asyncio.create_task(supervised("following KV events", subscriber.run))
    try:
        yield subscriber
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
