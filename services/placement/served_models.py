"""The models and LoRA adapters that engines list, so that a request for an adapter goes where it is served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scheduler.instances import UnknownModelError
from services.http.client import HttpClient
from services.http.json_body import reply_json
from services.http.origin import origin_of
from services.logs import log_event
from services.placement.instance_handle import InstanceHandle
from services.placement.instance_registry import InstanceRegistry

log = logging.getLogger(__name__)

LIST_EVERY_S = 10.0  # of instances that serve adapters
LIST_AGAIN_S = 2.0  # because of a request that names an unknown model
MAX_LISTS_PER_S = 20  # of all instances together
REPLY_S = 2.0
MAX_AT_ONCE = 16
MAX_MODELS = 4096  # of one engine
MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ListedModels:
    """What an engine lists: all names, and those of them that are adapters."""

    names: frozenset[str]
    adapters: frozenset[str]


class ServedModels:
    """Asks engines what they list: those that serve adapters from time to time, all for a name that is unknown."""

    def __init__(self, registry: InstanceRegistry, engines: HttpClient) -> None:
        """Ask nothing yet."""
        self._registry = registry
        self._engines = engines
        self._asking: asyncio.Task[None] | None = None
        self._asked_all_s = -float("inf")

    async def follow(self) -> None:
        """Ask the engines that serve adapters, again and again."""
        while True:
            await asyncio.sleep(max(LIST_EVERY_S, len(self._registry.handles()) / MAX_LISTS_PER_S))
            await self._ask([one for one in self._registry.handles() if _serves_adapters(one)])

    async def require(self, model: str) -> None:
        """Find out whether an instance serves a model; UnknownModelError where none does."""
        directory = self._registry.directory
        try:
            directory.rows_of_model(model)
        except UnknownModelError:
            if time.monotonic() - self._asked_all_s > max(LIST_AGAIN_S, len(directory.by_id) / MAX_LISTS_PER_S):
                self._asked_all_s = time.monotonic()
                self._asking = asyncio.create_task(self._ask(self._registry.handles()))
            if self._asking is not None:
                await asyncio.wait([self._asking], timeout=REPLY_S)
            directory.rows_of_model(model)

    def adapter_of(self, model: str) -> str:
        """Return the adapter that a model is; empty for a base model."""
        return model if model in self._registry.directory.adapters else ""

    def close(self) -> None:
        """Ask no longer."""
        if self._asking is not None:
            self._asking.cancel()
        self._engines.close()

    async def _ask(self, handles: Iterable[InstanceHandle]) -> None:
        turns = asyncio.Semaphore(MAX_AT_ONCE)

        async def ask(handle: InstanceHandle) -> None:
            async with turns:
                found = await self._of_engine(handle.instance.engine_url)
            if found is not None and handle.name in self._registry.directory.by_id:
                self._registry.directory.set_listed(handle.name, found.names, found.adapters)
                handle.message.adapters[:] = sorted(found.adapters)

        await asyncio.gather(*map(ask, handles))

    async def _of_engine(self, url: str) -> ListedModels | None:
        """Ask an engine; None where it does not reply."""
        try:
            status, body = await self._engines.get(origin_of(url), b"/v1/models", within_s=REPLY_S, max_bytes=MAX_BYTES)
            return models_in(reply_json(body)) if status == 200 else None
        except (ConnectionError, TimeoutError, ValueError) as error:
            log_event(log, logging.DEBUG, "engine lists no models", engine=url, reason=str(error))
            return None


def models_in(reply: Any) -> ListedModels:
    """Read the reply of /v1/models; ValueError where it is none. A model with a parent is an adapter."""
    cards = reply.get("data") if isinstance(reply, dict) else None
    if not isinstance(cards, list):
        raise ValueError("data: is no list of models")
    named = [card for card in cards[:MAX_MODELS] if isinstance(card, dict) and isinstance(card.get("id"), str)]
    return ListedModels(
        names=frozenset(card["id"] for card in named),
        adapters=frozenset(card["id"] for card in named if card.get("parent")),
    )


def _serves_adapters(handle: InstanceHandle) -> bool:
    return bool(handle.status.indicators.get("max_loras") or handle.status.adapters)
