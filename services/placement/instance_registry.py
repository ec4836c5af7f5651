"""The current instances, with a handle each and a connection per sidecar address."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from scheduler.disaggregation import SERVE_WHOLE
from scheduler.instances import DECODE_ROLE, PREFILL_ROLE, InstanceDirectory
from services.instances.drains import NEVER, Drain
from services.instances.instance import DRAINING, Instances
from services.logs import log_event
from services.placement.instance_handle import InstanceHandle
from services.placement.kv_event_followers import KvEventFollowers
from services.placement.metrics import SchedulerMetrics
from services.placement.settings import BY_ENGINE, SchedulerSettings
from services.placement.sidecar_connection import SidecarConnection

log = logging.getLogger(__name__)

MAX_REPORTS_PER_S = 1000  # of all sidecars together
DRAINING_REPORT_S = 0.5  # between reports of an instance that drains, which gets no other calls
REPORT_AT_ONCE = 16  # instances, for the live page


class InstanceRegistry:
    """Follows a list of instances: those that stay keep their connection and history, those that go are closed."""

    def __init__(self, settings: SchedulerSettings, metrics: SchedulerMetrics) -> None:
        """Start without an instance."""
        self.directory = InstanceDirectory()
        self.kv_events = KvEventFollowers(
            metrics.registry, hash_seed=settings.hash_seed, insecure=settings.kv_events_insecure
        )
        self._settings = settings
        self._metrics = metrics
        self._connections: dict[str, SidecarConnection] = {}  # by address
        self._handles: dict[str, InstanceHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_watched = False
        self._shown_every_s = math.inf
        self._followers: list[Callable[[Mapping[str, Drain]], None]] = []

    def update(self, instances: Instances) -> None:
        """Take a new list."""
        before = dict(self._handles)
        self._handles = {}  # a new one: decisions under way go on with theirs
        if self._settings.data_parallel_balancing == BY_ENGINE:  # no request names a rank
            instances = tuple(replace(one, data_parallel_rank=None) for one in instances)
        for instance in sorted(instances, key=lambda one: one.instance_id):
            known = before.get(instance.instance_id)
            if known is not None and known.take_changes_of(instance):
                self._handles[instance.instance_id] = before.pop(instance.instance_id)
            else:
                connection = self._connection_to(instance.sidecar_address)
                self._handles[instance.instance_id] = InstanceHandle(
                    instance, connection, self._settings, self._metrics, self.directory
                )
        self.directory.update(handle.status for handle in self._handles.values())
        self.kv_events.update(handle.instance for handle in self._handles.values())
        self._metrics.instances.set(len(self._handles))
        self._warn_of_pools()
        unused = self._unused_connections()
        for connection in unused:
            connection.stop_reserving()
        self._start(self._close(list(before.values()), unused))
        self._watch_all()
        drains = self.drains()
        for follower in list(self._followers):
            follower(drains)

    def drains(self) -> dict[str, Drain]:
        """Return the drains of the instances that drain."""
        draining = (handle.instance for handle in self._handles.values() if handle.instance.state == DRAINING)
        return {one.instance_id: one.drain or NEVER for one in draining}

    @contextmanager
    def drains_followed(self, take: Callable[[Mapping[str, Drain]], None]) -> Iterator[None]:
        """Call with the drains now, and after each new list while the block runs."""
        self._followers.append(take)
        try:
            take(self.drains())
            yield
        finally:
            self._followers.remove(take)

    def _warn_of_pools(self) -> None:
        """Warn, once for each list, of roles that no instance has although others need it."""
        roles = {handle.instance.role for handle in self._handles.values()}
        missing = [PREFILL_ROLE] if roles & {DECODE_ROLE} and PREFILL_ROLE not in roles else []
        missing += [DECODE_ROLE] if roles == {PREFILL_ROLE} else []
        for role in missing:
            served = "served as a whole" if self._settings.without_pool == SERVE_WHOLE else "refused"
            log_event(log, logging.WARNING, "no instance has a role", role=role, requests=served)

    def _connection_to(self, address: str) -> SidecarConnection:
        if address not in self._connections:
            self._connections[address] = SidecarConnection(
                address, self._settings, self._metrics, self.directory.suspects
            )
        return self._connections[address]

    def _unused_connections(self) -> list[SidecarConnection]:
        """Update which instances each connection reaches; return those without any."""
        names: dict[str, list[str]] = {address: [] for address in self._connections}
        for handle in self._handles.values():
            names[handle.instance.sidecar_address].append(handle.name)
        for address, connection in self._connections.items():
            connection.names = names[address]
        return [self._connections.pop(address) for address, those in names.items() if not those]

    def _start(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @staticmethod
    async def _close(handles: Sequence[InstanceHandle], connections: Sequence[SidecarConnection]) -> None:
        """Let handles finish, and then close their connections."""
        await asyncio.gather(*(handle.close() for handle in handles))
        await asyncio.gather(*(connection.close() for connection in connections))

    def watch(self) -> None:
        """Have all sidecars report by themselves from now on; the more of them, the more rarely each."""
        if not self._is_watched:
            self._is_watched = True
            self._watch_all()

    def show_every(self, interval_s: float | None) -> None:
        """Have all sidecars report at this interval while a page is open; None: as before."""
        self._shown_every_s = math.inf if interval_s is None else interval_s
        self._watch_all()

    def _watch_all(self) -> None:
        read_every_s = max(self._settings.watch_s, len(self._handles) / MAX_REPORTS_PER_S)
        interval_s = min(self._shown_every_s, read_every_s if self._is_watched else math.inf)
        # For a page they report in groups: all at once would delay decisions by milliseconds, and each by itself takes
        # twice the processor time.
        num_groups = 1 if self._is_watched or interval_s == math.inf else math.ceil(len(self._handles) / REPORT_AT_ONCE)
        for place, handle in enumerate(self._handles.values()):
            after_s = interval_s * (place % num_groups) / num_groups if num_groups > 1 else 0.0
            every_s = min(interval_s, DRAINING_REPORT_S) if handle.status.is_draining else interval_s
            handle.watch(every_s, after_s=after_s)

    def probe_suspects(self) -> None:
        """Probe the sidecars whose circuits are open, if it is time for a trial."""
        for name in self.directory.suspects:
            handle = self._handles.get(name)
            if handle is not None:
                handle.probe_if_due()

    def handles(self) -> list[InstanceHandle]:
        """Return all handles, by instance id."""
        return list(self._handles.values())

    def find(self, instance_id: str) -> InstanceHandle | None:
        """Return the handle of an instance, if there is one."""
        return self._handles.get(instance_id)

    async def close(self) -> None:
        """Close all handles and connections."""
        self.update(())
        await asyncio.gather(*self._closing)
        await self.kv_events.close()
