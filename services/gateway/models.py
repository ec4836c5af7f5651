"""The served models: those of the settings and their LoRA adapters, else all that the instances report."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from protos.block.v1 import common_pb2
from services.gateway.destinations import Fallback
from services.gateway.schedulers import NoSchedulerError, SchedulerClient
from services.http.client import HttpClient
from services.http.errors import ApiError
from services.http.json_body import reply_json
from services.http.origin import origin_of
from services.logs import log_event

log = logging.getLogger(__name__)

MAX_AGE_S = 5.0  # of a list
ENGINE_TIMEOUT_S = 2.0
MAX_ENGINES = 32  # that are called for one list


class Models:
    """The list behind /v1/models, made when it is requested."""

    def __init__(
        self, names: Iterable[str], schedulers: SchedulerClient, last_resort: Fallback, engines: HttpClient
    ) -> None:
        """Allow the models of the settings, or without any all that schedulers and engines report."""
        self._names = list(names)
        self._schedulers = schedulers
        self._last_resort = last_resort
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._until_s = 0.0
        self._listed: list[dict[str, Any]] = []
        self._lock = asyncio.Lock()

    async def require(self, name: str) -> None:
        """Refuse a name that is neither in the settings nor that of an adapter of such a model."""
        if self._names and name not in self._names and name not in {one["id"] for one in await self.listed()}:
            raise ApiError(404, f"The model `{name}` does not exist.", code="model_not_found", param="model")

    async def listed(self) -> list[dict[str, Any]]:
        """Return OpenAI's model objects, those of the settings first, and ordered by id."""
        async with self._lock:
            if self._loop.time() >= self._until_s:
                self._listed = await self._collect()
                self._until_s = self._loop.time() + MAX_AGE_S
        return self._listed

    async def _collect(self) -> list[dict[str, Any]]:
        """Collect the models of instances, and call the engines whose instances report none."""
        if self._names:
            return [*map(described, self._names), *await self._adapters()]
        models: dict[str, dict[str, Any]] = {}
        instances = await self._instances()
        for instance in instances:
            models.update((name, described(name)) for name in instance.models)
            base = instance.models[0] if instance.models else None
            models.update((name, described(name) | {"parent": base}) for name in instance.adapters)
        for found in await self._of_engines({one.engine_url for one in instances if not one.models}):
            models.update((model["id"], model) for model in found)
        return [models[name] for name in sorted(models)]

    async def _adapters(self) -> list[dict[str, Any]]:
        """Collect the adapters of the models of the settings, as instances and engines report them."""
        allowed = set(self._names)
        adapters: dict[str, dict[str, Any]] = {}
        try:
            instances = [one for one in await self._instances() if not one.models or allowed.intersection(one.models)]
        except ApiError as error:
            log_event(log, logging.INFO, "adapters are not known", why=str(error))
            return []
        for instance in instances:
            base = instance.models[0] if instance.models else None
            adapters.update((name, described(name) | {"parent": base}) for name in instance.adapters)
        for found in await self._of_engines({instance.engine_url for instance in instances}):
            adapters.update((model["id"], model) for model in found if model.get("parent") in self._names)
        return [adapters[name] for name in sorted(adapters) if name not in allowed]

    async def _of_engines(self, urls: set[str]) -> list[list[dict[str, Any]]]:
        """Call engines, and those that no instance is known of."""
        called = sorted({*urls, *self._last_resort.urls})[:MAX_ENGINES]
        return await asyncio.gather(*map(self._of_engine, called))

    async def _instances(self) -> Sequence[common_pb2.Instance]:
        """Return the schedulers' instances; where none responds, those of recent decisions."""
        try:
            return await self._schedulers.instances()
        except NoSchedulerError as error:
            if not self._last_resort:
                raise ApiError(503, f"the models are not known at the moment: {error}") from None
            return self._last_resort.named()

    async def _of_engine(self, url: str) -> list[dict[str, Any]]:
        try:
            status, body = await self._engines.get(origin_of(url), b"/v1/models", within_s=ENGINE_TIMEOUT_S)
            data = reply_json(body)["data"] if status == 200 else []
            return [model for model in data if isinstance(model["id"], str)]
        except (ConnectionError, TimeoutError, ValueError, TypeError, LookupError) as error:
            log_event(log, logging.INFO, "engine reports no models", engine=url, why=str(error))
            return []


def described(name: str) -> dict[str, Any]:
    """Describe a model as OpenAI does."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "block"}
