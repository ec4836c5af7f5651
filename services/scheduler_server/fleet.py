"""The sidecars of the instances that there are now."""

from __future__ import annotations

import asyncio

from services.failures import UnknownNameError
from services.instances import Instances
from services.scheduler_server.measures import Measures
from services.scheduler_server.settings import SchedulerSettings
from services.scheduler_server.sidecar import Sidecar


class Fleet:
    """Follows a list of instances: what stays keeps its connection and its history, what goes is let go."""

    def __init__(self, settings: SchedulerSettings, measures: Measures) -> None:
        """Start with none."""
        self._settings = settings
        self._measures = measures
        self._sidecars: dict[str, Sidecar] = {}
        self._by_model: dict[str, tuple[Sidecar, ...]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, instances: Instances) -> None:
        """Take a new list."""
        before, self._sidecars = self._sidecars, {}
        for instance in instances:
            known = before.get(instance.instance_id)
            if known is not None and known.instance == instance:
                self._sidecars[instance.instance_id] = before.pop(instance.instance_id)
            else:
                self._sidecars[instance.instance_id] = Sidecar(instance, self._settings, self._measures)
        self._by_model.clear()
        self._measures.instances.set(len(self._sidecars))
        for gone in before.values():
            task = asyncio.create_task(gone.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def named(self, instance_id: str) -> Sidecar | None:
        """Find one."""
        return self._sidecars.get(instance_id)

    def serving(self, model: str) -> tuple[Sidecar, ...]:
        """Find all that may serve a model; no model means the only one that there is."""
        if not self._sidecars:
            raise ConnectionError("no instance is known")
        found = self._by_model.get(model)
        if found is None:
            found = self._look_up(model)
            if len(self._by_model) < 1024:
                self._by_model[model] = found
        return found

    def _look_up(self, model: str) -> tuple[Sidecar, ...]:
        models = sorted({name for sidecar in self._sidecars.values() for name in sidecar.instance.models})
        if not model:
            if len(models) > 1:
                raise ValueError(f"request.model: is missing; there are {', '.join(models)}")
            return tuple(self._sidecars.values())
        found = tuple(
            sidecar
            for sidecar in self._sidecars.values()
            if not sidecar.instance.models or model in sidecar.instance.models
        )
        if not found:
            raise UnknownNameError(f"request.model: {model!r} is served by no instance; there are {', '.join(models)}")
        return found

    async def close(self) -> None:
        """Let all go."""
        self.update(())
        await asyncio.gather(*self._closing)
