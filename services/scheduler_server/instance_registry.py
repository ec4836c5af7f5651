"""The sidecars of the instances that there are now."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler.candidates import Places
from scheduler.instance_table import InstanceTable
from services.instances import Instances
from services.placement.settings import SchedulerSettings
from services.rpc.errors import UnknownNameError
from services.scheduler_server.instance_handle import InstanceHandle
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.sidecar_connection import SidecarConnection

MOST_MODELS = 1024  # whose instances are remembered
MOST_TOLD_PER_S = 1000  # messages of all sidecars about themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInstances:
    """The instances of one model by name, in the order of their ids, and where they are in the fleet's table."""

    sidecars: Mapping[str, InstanceHandle]
    places: Places | None  # None: they are all that there are

    def without(self, names: Collection[str], place_of: Mapping[str, int]) -> Places | None:
        """Give the places of all but some."""
        out = [place_of[name] for name in names]
        if not out:
            return self.places
        places = np.arange(len(place_of)) if self.places is None else self.places
        return places[~np.isin(places, out)]


class InstanceRegistry:
    """Follows a list of instances: what stays keeps its connection and its history, what goes is let go."""

    def __init__(self, settings: SchedulerSettings, measures: SchedulerMetrics) -> None:
        """Start with none."""
        self.table = InstanceTable()
        self.troubled: set[str] = set()  # who may not be well; who is not among them is
        self._settings = settings
        self._measures = measures
        self._nodes: dict[str, SidecarConnection] = {}  # by address
        self._sidecars: dict[str, InstanceHandle] = {}
        self._by_model: dict[str, ModelInstances] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._watched = False

    def update(self, instances: Instances) -> None:
        """Take a new list."""
        before = dict(self._sidecars)
        self._sidecars = {}  # and not the same one emptied: decisions under way go on with theirs
        for instance in sorted(instances, key=lambda one: one.instance_id):
            known = before.get(instance.instance_id)
            if known is not None and known.instance == instance:
                self._sidecars[instance.instance_id] = before.pop(instance.instance_id)
            else:
                self._sidecars[instance.instance_id] = InstanceHandle(
                    instance, self._node_at(instance.sidecar_address), self._settings, self._measures, self.table
                )
        self._by_model.clear()
        self.table.follow(self._sidecars.keys() - before.keys())  # one that is there anew is known no more
        self.table.follow(self._sidecars)
        self.troubled.intersection_update(self._sidecars)
        self._measures.instances.set(len(self._sidecars))
        left = self._nodes_left()
        for node in left:
            node.promises_no_more()
        self._start(self._let_go(list(before.values()), left))
        if self._watched:
            self._watch_all()

    def _node_at(self, address: str) -> SidecarConnection:
        if address not in self._nodes:
            self._nodes[address] = SidecarConnection(address, self._settings, self._measures, self.troubled)
        return self._nodes[address]

    def _nodes_left(self) -> list[SidecarConnection]:
        """Tell each node who answers there now; give those where nobody does any more."""
        names: dict[str, list[str]] = {address: [] for address in self._nodes}
        for sidecar in self._sidecars.values():
            names[sidecar.instance.sidecar_address].append(sidecar.name)
        for address, node in self._nodes.items():
            node.names = names[address]
        return [self._nodes.pop(address) for address, those in names.items() if not those]

    def _start(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @staticmethod
    async def _let_go(sidecars: Sequence[InstanceHandle], nodes: Sequence[SidecarConnection]) -> None:
        """Let sidecars finish, and then the ways to them."""
        await asyncio.gather(*(sidecar.close() for sidecar in sidecars))
        await asyncio.gather(*(node.close() for node in nodes))

    def watch(self) -> None:
        """Have all sidecars tell of themselves from now on; many of them more seldom."""
        if not self._watched:
            self._watched = True
            self._watch_all()

    def _watch_all(self) -> None:
        interval_s = max(self._settings.watch_s, len(self._sidecars) / MOST_TOLD_PER_S)
        for sidecar in self._sidecars.values():
            sidecar.watch(interval_s)

    def everybody(self) -> list[InstanceHandle]:
        """Give all of them, in the order of their ids."""
        return list(self._sidecars.values())

    def named(self, instance_id: str) -> InstanceHandle | None:
        """Find one."""
        return self._sidecars.get(instance_id)

    def serving(self, model: str) -> ModelInstances:
        """Find all that may serve a model; no model means the only one that there is."""
        if not self._sidecars:
            raise ConnectionError("no instance is known")
        found = self._by_model.get(model)
        if found is None:
            found = self._look_up(model)
            if len(self._by_model) < MOST_MODELS:
                self._by_model[model] = found
        return found

    def _look_up(self, model: str) -> ModelInstances:
        models = sorted({name for sidecar in self._sidecars.values() for name in sidecar.instance.models})
        if not model:
            if len(models) > 1:
                raise ValueError(f"request.model: is missing; there are {', '.join(models)}")
            return ModelInstances(sidecars=self._sidecars, places=None)
        found = {
            name: sidecar
            for name, sidecar in self._sidecars.items()
            if not sidecar.instance.models or model in sidecar.instance.models
        }
        if not found:
            raise UnknownNameError(f"request.model: {model!r} is served by no instance; there are {', '.join(models)}")
        if len(found) == len(self._sidecars):
            return ModelInstances(sidecars=self._sidecars, places=None)
        return ModelInstances(sidecars=found, places=np.array([self.table.place_of[name] for name in found], np.intp))

    async def close(self) -> None:
        """Let all go."""
        self.update(())
        await asyncio.gather(*self._closing)
