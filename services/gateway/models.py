"""Which models there are: those of the settings; else those that the schedulers' instances say they serve."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from protos.block.v1 import common_pb2
from services.gateway.destinations import Fallback
from services.gateway.schedulers import NobodyError, Schedulers
from services.http.client import HttpClient, origin_of
from services.http.errors import ApiError
from services.logs import log_event

log = logging.getLogger(__name__)

KEEP_S = 5.0  # a list is good for so long
ENGINE_S = 2.0
MOST_ASKED = 32  # engines that are asked themselves


class Models:
    """The list behind /v1/models, made when somebody asks for it."""

    def __init__(
        self, names: Iterable[str], schedulers: Schedulers, last_resort: Fallback, engines: HttpClient
    ) -> None:
        """Know whom to ask."""
        self._names = list(names)
        self._schedulers = schedulers
        self._last_resort = last_resort
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._until_s = 0.0
        self._listed: list[dict[str, Any]] = []
        self._lock = asyncio.Lock()

    async def listed(self) -> list[dict[str, Any]]:
        """Give OpenAI's model objects, by id."""
        if self._names:
            return [described(name) for name in self._names]
        async with self._lock:
            if self._loop.time() >= self._until_s:
                self._listed = await self._ask()
                self._until_s = self._loop.time() + KEEP_S
        return self._listed

    async def _ask(self) -> list[dict[str, Any]]:
        """Collect from instances what they serve; from engines, where their instances do not say."""
        models: dict[str, dict[str, Any]] = {}
        instances = await self._instances()
        for instance in instances:
            models.update((name, described(name)) for name in instance.models)
        silent = {instance.engine_url for instance in instances if not instance.models}
        urls = sorted({*silent, *self._last_resort.urls})
        for told in await asyncio.gather(*(self._of_engine(url) for url in urls[:MOST_ASKED])):
            models.update((model["id"], model) for model in told)
        return [models[name] for name in sorted(models)]

    async def _instances(self) -> Sequence[common_pb2.Instance]:
        """Ask the schedulers; where none answers, those that decisions named must do."""
        try:
            return await self._schedulers.instances()
        except NobodyError as error:
            if not self._last_resort:
                raise ApiError(503, f"the models are not known now: {error}") from None
            return self._last_resort.named()

    async def _of_engine(self, url: str) -> list[dict[str, Any]]:
        try:
            status, body = await self._engines.get(origin_of(url), b"/v1/models", within_s=ENGINE_S)
            data = json.loads(body)["data"] if status == 200 else []
            return [model for model in data if isinstance(model["id"], str)]
        except (ConnectionError, TimeoutError, ValueError, TypeError, LookupError) as error:
            log_event(log, logging.INFO, "engine does not tell its models", engine=url, why=str(error))
            return []


def described(name: str) -> dict[str, Any]:
    """Describe a model as OpenAI does."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "block"}
