"""The models that clients may name: those of the settings and their LoRA adapters, else all that instances serve."""

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
RETRY_S = 1.0  # after which a list is made again that has no adapters because none are known yet
ENGINE_TIMEOUT_S = 2.0
MAX_ENGINES = 32  # that are called for one list

Card = dict[str, Any]  # one model, as OpenAI describes it


class Models:
    """Allows the models that requests name, and lists them for /v1/models.

    A list is made when it is needed and the last one is too old. Schedulers and engines that do not reply then count
    with what they reported last.
    """

    def __init__(
        self, names: Iterable[str], schedulers: SchedulerClient, last_resort: Fallback, engines: HttpClient
    ) -> None:
        """Allow the models of the settings and their adapters; without any in the settings, allow every name."""
        self._names = list(names)
        self._schedulers = schedulers
        self._last_resort = last_resort
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._until_s = 0.0
        self._listed: list[Card] = []
        self._lock = asyncio.Lock()
        self._reported: Sequence[common_pb2.Instance] = ()  # by schedulers, when one last replied
        self._by_engine: dict[str, list[Card]] = {}  # what each engine listed when it last replied, by URL
        self._are_adapters_known = False  # whether any instance or engine has reported its own

    async def require(self, name: str) -> None:
        """Refuse a name that is neither in the settings nor that of an adapter of such a model.

        The status is 404, or 503 while nothing is known of adapters: the name may be that of one.
        """
        if not self._names or name in self._names or any(card["id"] == name for card in await self.listed()):
            return
        if not self._are_adapters_known:
            raise ApiError(503, f"it is not known yet whether `{name}` is an adapter; retry later", param="model")
        raise ApiError(404, f"The model `{name}` does not exist.", code="model_not_found", param="model")

    async def listed(self) -> list[Card]:
        """Return the models of the settings in their order, then their adapters by id.

        Without any in the settings, return all models and adapters of the instances by id; ApiError where no instance
        is known.
        """
        async with self._lock:
            if self._loop.time() >= self._until_s:
                if self._names:
                    self._listed = [*map(described, self._names), *await self._adapters()]
                else:
                    self._listed = await self._all()
                is_whole = self._are_adapters_known or not self._names
                self._until_s = self._loop.time() + (MAX_AGE_S if is_whole else RETRY_S)
        return self._listed

    async def _all(self) -> list[Card]:
        """Return the models and adapters of all instances; where an instance names no models, those of its engine."""
        models: dict[str, Card] = {}
        instances = await self._instances()
        for instance in instances:
            models.update((name, described(name)) for name in instance.models)
            models.update(adapters_of(instance))
        for cards in await self._of_engines(one.engine_url for one in instances if not one.models):
            models.update((card["id"], card) for card in cards)
        return [models[name] for name in sorted(models)]

    async def _adapters(self) -> list[Card]:
        """Return the adapters of the models of the settings, as instances and their engines report them.

        Those of an instance that names no models may be of any model, and count only where its engine lists a model of
        the settings as their parent.
        """
        adapters: dict[str, Card] = {}
        try:
            instances = await self._instances()
        except ApiError as error:
            log_event(log, logging.INFO, "adapters are not known", why=str(error))
            instances = ()
        serving = [one for one in instances if not one.models or not set(self._names).isdisjoint(one.models)]
        for instance in serving:
            if instance.models:
                adapters.update(adapters_of(instance))
        lists = await self._of_engines(one.engine_url for one in serving)
        for cards in lists:
            adapters.update((card["id"], card) for card in cards if card.get("parent") in self._names)
        self._are_adapters_known = bool(lists) or any(one.models for one in instances)
        return [adapters[name] for name in sorted(adapters) if name not in self._names]

    async def _instances(self) -> Sequence[common_pb2.Instance]:
        """Return the schedulers' instances; where no scheduler replies, the last ones and those of recent decisions."""
        try:
            self._reported = await self._schedulers.instances()
        except NoSchedulerError as error:
            if not self._reported and not self._last_resort:
                raise ApiError(503, f"the models are not known at the moment: {error}") from None
            known = {one.instance_id: one for one in (*self._reported, *self._last_resort.named())}
            return list(known.values())
        return self._reported

    async def _of_engines(self, urls: Iterable[str]) -> list[list[Card]]:
        """Call the engines at some URLs, and those of the settings whose instances no decision has named.

        Return what each lists, or listed last; engines that have never replied are left out.
        """
        called = sorted({*urls, *self._last_resort.urls})[:MAX_ENGINES]
        found = await asyncio.gather(*map(self._of_engine, called))
        lists = {url: self._by_engine.get(url) if one is None else one for url, one in zip(called, found, strict=True)}
        self._by_engine = {url: cards for url, cards in lists.items() if cards is not None}
        return list(self._by_engine.values())

    async def _of_engine(self, url: str) -> list[Card] | None:
        """Return what an engine lists; None where it does not reply with a list."""
        try:
            status, body = await self._engines.get(origin_of(url), b"/v1/models", within_s=ENGINE_TIMEOUT_S)
            if status != 200:
                raise ValueError(f"status {status}")
            return [card for card in reply_json(body)["data"] if isinstance(card["id"], str)]
        except (ConnectionError, TimeoutError, ValueError, TypeError, LookupError) as error:
            log_event(log, logging.INFO, "engine reports no models", engine=url, why=str(error))
            return None


def described(name: str) -> Card:
    """Describe a model as OpenAI does."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "block"}


def adapters_of(instance: common_pb2.Instance) -> dict[str, Card]:
    """Describe the adapters that an instance reports, by id; their parent is the first model that it names, if any."""
    parent = instance.models[0] if instance.models else None
    return {name: described(name) | {"parent": parent} for name in instance.adapters}
