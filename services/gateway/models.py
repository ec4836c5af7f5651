"""The served models: those of the settings, else those that the instances report."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from protos.block.v1 import common_pb2
from services.gateway.destinations import Fallback
from services.gateway.schedulers import NoSchedulerError, SchedulerClient
from services.http.client import HttpClient, origin_of
from services.http.errors import ApiError
from services.http.json_body import reply_json
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
        """Take the models from the settings, or collect them from schedulers and engines."""
        self._names = list(names)
        self._schedulers = schedulers
        self._last_resort = last_resort
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._until_s = 0.0
        self._listed: list[dict[str, Any]] = []
        self._lock = asyncio.Lock()

    async def listed(self) -> list[dict[str, Any]]:
        """Return OpenAI's model objects, ordered by id."""
        if self._names:
            return [described(name) for name in self._names]
        async with self._lock:
            if self._loop.time() >= self._until_s:
                self._listed = await self._collect()
                self._until_s = self._loop.time() + MAX_AGE_S
        return self._listed

    async def _collect(self) -> list[dict[str, Any]]:
        """Collect the models of instances, and call the engines whose instances report none."""
        models: dict[str, dict[str, Any]] = {}
        instances = await self._instances()
        for instance in instances:
            models.update((name, described(name)) for name in instance.models)
            base = instance.models[0] if instance.models else None
            models.update((name, described(name) | {"parent": base}) for name in instance.adapters)
        unknown = {instance.engine_url for instance in instances if not instance.models}
        urls = sorted({*unknown, *self._last_resort.urls})
        for found in await asyncio.gather(*(self._of_engine(url) for url in urls[:MAX_ENGINES])):
            models.update((model["id"], model) for model in found)
        return [models[name] for name in sorted(models)]

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
