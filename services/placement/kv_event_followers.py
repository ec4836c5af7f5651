"""Follows the KV events of the instances whose list names them, for policies that read prefix hits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from predictor.kv_events.stream import KvEventStream
from services.instances.instance import Instance
from services.kv_events.metrics import KvEventCollectors, KvEventMetrics
from services.kv_events.settings import KvEventSettings
from services.logs import log_event
from services.supervised_task import supervised

log = logging.getLogger(__name__)

Endpoints = tuple[str, str]


class KvEventFollowers:
    """One subscriber for each instance with KV events; `streams` has what they know, by instance."""

    def __init__(self, registry: CollectorRegistry, *, hash_seed: str, insecure: bool) -> None:
        """Start without an instance."""
        self.streams: dict[str, KvEventStream] = {}
        self._registry = registry
        self._collectors: KvEventCollectors | None = None
        self._hash_seed = hash_seed
        self._insecure = insecure
        self._followed: dict[str, tuple[Endpoints, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def update(self, instances: Iterable[Instance]) -> None:
        """Follow these instances, and no others."""
        wanted = {one.instance_id: (one.kv_events, one.kv_events_replay) for one in instances if one.kv_events}
        for name, (endpoints, task) in list(self._followed.items()):
            if wanted.get(name) != endpoints:
                del self._followed[name]
                self.streams.pop(name, None)
                task.cancel()
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
        for name, endpoints in wanted.items():
            if name not in self._followed:
                self._follow(name, endpoints)

    async def close(self) -> None:
        """Stop following."""
        self.update(())
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _follow(self, name: str, endpoints: Endpoints) -> None:
        """Start a subscriber; one that is not allowed is logged, and the instance's hits are estimated."""
        from services.kv_events.subscriber import KvEventSubscriber, stream_of  # loads ZeroMQ

        try:
            settings = KvEventSettings(endpoint=endpoints[0], replay_endpoint=endpoints[1], hash_seed=self._hash_seed)
            settings.require_local(insecure=self._insecure)
        except ValueError as error:
            reason = str(error).replace("--insecure", "--kv-events-insecure")
            log_event(log, logging.ERROR, "KV events are not followed", instance=name, reason=reason)
            return
        if self._collectors is None:
            self._collectors = KvEventCollectors(self._registry)
        stream = self.streams[name] = stream_of(settings)
        subscriber = KvEventSubscriber(settings, stream, KvEventMetrics(self._collectors, name, stream))
        self._followed[name] = endpoints, asyncio.create_task(supervised("following KV events", subscriber.run))
