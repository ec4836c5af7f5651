"""Publishes KV events as vLLM does, with replays, for emulated engines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import zmq
import zmq.asyncio

from predictor.kv_events.events import KvEvent, KvEventBatch
from predictor.suggestions import require_known
from services.kv_events.wire import END_OF_REPLAY, SEQUENCE_BYTES, frames_of, payload_of
from services.logs import log_event

log = logging.getLogger(__name__)

PUBLISHERS = ZMQ, NO_PUBLISHER = "zmq", "null"
MAX_STEPS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """vLLM's `--kv-events-config`, with its defaults."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        """Refuse values that no engine accepts."""
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ValueError(f"enable_kv_cache_events: must be true or false, not {self.enable_kv_cache_events!r}")
        if self.publisher not in (None, *PUBLISHERS):
            raise ValueError(f"publisher: {self.publisher!r} is neither {' nor '.join(PUBLISHERS)}")
        for name in ("endpoint", "topic", "replay_endpoint"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "replay_endpoint" and value is None):
                raise ValueError(f"{name}: must be a text, not {value!r}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_STEPS:
                raise ValueError(f"{name}: must be a number from 0 to {MAX_STEPS}, not {value!r}")

    @property
    def publishes(self) -> bool:
        """Whether there is anything to publish, and where."""
        return self.enable_kv_cache_events and self.publisher != NO_PUBLISHER


def kv_events_config(text: str) -> KvEventsConfig:
    """Read the JSON of `--kv-events-config`; ValueError names the field."""
    try:
        data: Any = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"kv_events_config: is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("kv_events_config: must be an object")
    try:
        require_known(data, [one.name for one in fields(KvEventsConfig)], "key")
        return KvEventsConfig(**data)
    except ValueError as error:
        raise ValueError(f"kv_events_config.{error}") from None


class KvEventPublisher:
    """Publishes batches within one event loop, and repeats the last ones for those who ask."""

    def __init__(self, config: KvEventsConfig, rank: int = 0) -> None:
        """Open the sockets of a data-parallel rank; ValueError where an endpoint cannot be used."""
        self._topic = config.topic
        self._rank = rank
        self._context = zmq.asyncio.Context()
        self.num_published = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._serving: asyncio.Task[None] | None = None
        self._publishing = zmq.Socket(zmq.Context(self._context), zmq.PUB)  # never blocks
        self._publishing.set(zmq.SNDHWM, config.hwm)
        self._replaying: zmq.asyncio.Socket | None = None
        try:
            endpoint = _of_rank("endpoint", config.endpoint, rank)
            self._open(self._publishing, "endpoint", endpoint, binds=_is_bound(endpoint))
            if config.replay_endpoint is not None:
                self._replaying = self._context.socket(zmq.ROUTER)
                replay_endpoint = _of_rank("replay_endpoint", config.replay_endpoint, rank)
                self._open(self._replaying, "replay_endpoint", replay_endpoint, binds=True)
        except ValueError:
            self.close()
            raise

    @staticmethod
    def _open(socket: zmq.Socket[Any], field: str, endpoint: str, *, binds: bool) -> None:
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"kv_events_config.{field}: {endpoint}: {error.strerror}") from None

    def start(self) -> None:
        """Begin to serve replays."""
        if self._replaying is not None:
            self._serving = asyncio.create_task(self._serve(self._replaying))

    def publish(self, published_s: float, events: Sequence[KvEvent]) -> None:
        """Publish the events of a step."""
        payload = payload_of(KvEventBatch(published_s=published_s, events=tuple(events), rank=self._rank))
        with suppress(zmq.Again):  # beyond the high-water mark events are lost, as vLLM's are
            self._publishing.send_multipart(frames_of(self._topic, self.num_published, payload), zmq.NOBLOCK)
        self._kept.append((self.num_published, payload))
        self.num_published += 1

    def close(self) -> None:
        """Close the sockets at once."""
        if self._serving is not None:
            self._serving.cancel()
        self._publishing.close(linger=0)
        if self._replaying is not None:
            self._replaying.close(linger=0)
        self._context.destroy(linger=0)

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
                log_event(log, logging.WARNING, "invalid request for KV events", frames=len(frames))
                continue
            asker, start = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in list(self._kept):
                if sequence >= start:
                    await socket.send_multipart([asker, b"", *frames_of(self._topic, sequence, payload)])
            await socket.send_multipart([asker, b"", b"", END_OF_REPLAY, b""])


def _of_rank(field: str, endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank, as vLLM: the next port for each; other addresses are of one rank."""
    if rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if not (endpoint.startswith("tcp://") and port.isdecimal()):
        raise ValueError(f"kv_events_config.{field}: {endpoint} must be tcp:// with a port, for several ranks")
    return f"{address}:{int(port) + rank}"


def _is_bound(endpoint: str) -> bool:
    """Return whether vLLM binds to an endpoint; it connects to others."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
