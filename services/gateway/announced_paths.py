"""Paths that instances announce in their OpenAPI document, beyond those that the gateway knows."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
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

MAX_AGE_S = 60.0  # of what an instance announces
RETRY_S = 5.0  # after which instances and schedulers that did not reply are asked again
TIMEOUT_S = 30.0  # an engine writes its first document slowly
WAIT_S = 5.0  # of a request for what instances announce
MAX_INSTANCES = 64  # that are asked
MAX_DOCUMENT_BYTES = 4 * 2**20
MAX_PATHS = 256  # of one instance
NONE: frozenset[str] = frozenset()

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
        self._asking: asyncio.Task[None] | None = None
        self._are_all_known = False  # a scheduler has listed the instances, or there is none

    async def others(self, path: str) -> list[str] | None:
        """Return the instances that do not announce a path; None where none does.

        ApiError where that is not known yet.
        """
        if self._loop.time() >= self._until_s and self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        serving = self._serving(path)
        if not serving and self._asking is not None:
            await asyncio.wait([self._asking], timeout=WAIT_S)
            serving = self._serving(path)
        if not serving and (self._asking is not None or not self._are_all_known):
            raise ApiError(503, "the instances have not yet announced what they serve; retry later")
        return [name for name in self._by_instance if name not in serving] if serving else None

    def _serving(self, path: str) -> list[str]:
        return [name for name, paths in self._by_instance.items() if path in paths]

    def close(self) -> None:
        """Ask no longer."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        """Ask all instances; those that do not reply, or that no scheduler lists now, keep what they announced."""
        try:
            instances, are_all = await self._instances()
            some = [(one.instance_id, one.engine_url) for one in instances][:MAX_INSTANCES]
            replies = await asyncio.gather(*(self._of_engine(url) for _, url in some))
            known = self._by_instance
            found = {
                name: known.get(name, NONE) if paths is None else paths
                for (name, _), paths in zip(some, replies, strict=True)
            }
            self._by_instance = found if are_all else {**known, **found}
            self._are_all_known |= are_all
            self._until_s = self._loop.time() + (MAX_AGE_S if are_all and None not in replies else RETRY_S)
        finally:
            self._asking = None

    async def _instances(self) -> tuple[Sequence[common_pb2.Instance], bool]:
        """Return the schedulers' instances, or those of recent decisions, and whether these are all there are."""
        try:
            return await self._schedulers.instances(), True
        except NoSchedulerError:
            return self._last_resort.named(), len(self._schedulers) == 0

    async def _of_engine(self, url: str) -> frozenset[str] | None:
        """Ask an engine; None where it does not reply."""
        try:
            status, body = await self._engines.get(
                origin_of(url), b"/openapi.json", within_s=TIMEOUT_S, max_bytes=MAX_DOCUMENT_BYTES
            )
            return paths_in(reply_json(body)) if status == 200 else NONE
        except (ConnectionError, TimeoutError, ValueError) as error:
            log_event(log, logging.INFO, "engine announces no paths", engine=url, why=str(error))
            return None


def paths_in(document: Any) -> frozenset[str]:
    """Return the paths of an OpenAPI document that take POST and may be passed."""
    paths = document.get("paths") if isinstance(document, dict) else None
    if not isinstance(paths, dict):
        return NONE
    found = (path for path, methods in paths.items() if isinstance(methods, dict) and "post" in methods)
    return frozenset([path for path in found if may_be_passed(path)][:MAX_PATHS])
