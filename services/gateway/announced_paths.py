"""Paths that instances announce in their OpenAPI document, beyond those that the gateway knows."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from protos.block.v1 import common_pb2
from services.gateway.destinations import Fallback
from services.gateway.schedulers import NoSchedulerError, SchedulerClient
from services.http.client import HttpClient, origin_of
from services.logs import log_event

log = logging.getLogger(__name__)

MAX_AGE_S = 60.0  # of what an instance announces
TIMEOUT_S = 2.0
MAX_INSTANCES = 64  # that are asked
MAX_DOCUMENT_BYTES = 4 * 2**20
MAX_PATHS = 256  # of one instance

# Only paths of inference APIs are passed, and of those none that administers an engine or reaches other requests.
ALLOWED = re.compile(r"/(?:v1|v2|cohere/v2|inference/v1)/[\w./-]{1,200}|/generative_scoring")
DENIED = re.compile(
    r"lora|adapter|sleep|wake|pause|resume|reset|cache|collective|rpc|abort|cancel|weight|profile|scale|elastic|fault|"
    r"admin|server_info|shutdown|load_|unload|update|world_size|\.\.|//",
    re.IGNORECASE,
)


def may_be_passed(path: str) -> bool:
    """Return whether a path that an instance announces may be passed to it."""
    return ALLOWED.fullmatch(path) is not None and DENIED.search(path) is None


class AnnouncedPaths:
    """Which instances serve a path, by what they announce; asked again after a minute."""

    def __init__(self, schedulers: SchedulerClient, last_resort: Fallback, engines: HttpClient) -> None:
        """Ask no instance yet."""
        self._schedulers = schedulers
        self._last_resort = last_resort
        self._engines = engines
        self._loop = asyncio.get_running_loop()
        self._until_s = 0.0
        self._by_instance: Mapping[str, frozenset[str]] = {}
        self._lock = asyncio.Lock()

    async def others(self, path: str) -> list[str] | None:
        """Return the instances that do not announce a path; None where none does."""
        async with self._lock:
            if self._loop.time() >= self._until_s:
                self._by_instance = await self._asked()
                self._until_s = self._loop.time() + MAX_AGE_S
        serving = [name for name, paths in self._by_instance.items() if path in paths]
        return [name for name in self._by_instance if name not in serving] if serving else None

    async def _asked(self) -> dict[str, frozenset[str]]:
        instances = [(one.instance_id, one.engine_url) for one in await self._instances()]
        some = instances[:MAX_INSTANCES]
        found = await asyncio.gather(*(self._of_engine(url) for _, url in some))
        return {name: paths for (name, _), paths in zip(some, found, strict=True)}

    async def _instances(self) -> Sequence[common_pb2.Instance]:
        try:
            return await self._schedulers.instances()
        except NoSchedulerError:
            return self._last_resort.named()

    async def _of_engine(self, url: str) -> frozenset[str]:
        try:
            status, body = await self._engines.get(
                origin_of(url), b"/openapi.json", within_s=TIMEOUT_S, max_bytes=MAX_DOCUMENT_BYTES
            )
            return paths_in(json.loads(body)) if status == 200 else frozenset()
        except (ConnectionError, TimeoutError, ValueError, RecursionError) as error:
            log_event(log, logging.INFO, "engine announces no paths", engine=url, why=str(error))
            return frozenset()


def paths_in(document: Any) -> frozenset[str]:
    """Return the paths of an OpenAPI document that take POST and may be passed."""
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(paths, dict):
        return frozenset()
    found = (path for path, methods in paths.items() if isinstance(methods, dict) and "post" in methods)
    return frozenset([path for path in found if may_be_passed(path)][:MAX_PATHS])
