"""Keeps a copy of a collection: lists it, watches it from there, and lists it again where that version is gone."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from scheduler.backoff import Backoff
from services.kubernetes.api import (
    GONE,
    NOT_FOUND,
    PAGE_ITEMS,
    TOO_MANY,
    KubernetesApi,
    KubernetesError,
    Object,
    Resource,
)
from services.logs import log_event

T = TypeVar("T")

log = logging.getLogger(__name__)

WATCH_S = 60  # after which the server ends a watch, so that a connection that died is noticed soon
QUIET_S = WATCH_S + 15.0
LIVED_S = 1.0  # a watch that lived as long, or brought an event, has worked
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
ABSENT_PAUSE_S = 60.0  # until an optional kind of object that the cluster does not know is asked for again


class Reflector(Generic[T]):
    """A copy of the objects of a resource, as values made by `keep`; None leaves one out.

    `synced` says whether it was ever listed; `problem` why it cannot be followed now, empty while it is.
    """

    def __init__(
        self,
        api: KubernetesApi,
        resource: Resource,
        keep: Callable[[Object], T | None],
        changed: Callable[[], None],
        *,
        optional: bool = False,
    ) -> None:
        """Read nothing yet. `optional`: clusters that do not know this kind of object are right, too."""
        self.items: dict[str, T] = {}
        self.synced = False
        self.problem = ""
        self.resource = resource
        self._api, self._keep, self._changed = api, keep, changed
        self._optional = optional
        self._version = ""
        self._logged = ""  # the problem that the log has
        self._backoff = Backoff(first_s=FIRST_PAUSE_S, max_s=LONGEST_PAUSE_S, random=random.random)

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        while True:
            started_s, had_events = time.monotonic(), False
            try:
                if not self._version:
                    await self._list()
                    started_s = time.monotonic()
                had_events = await self._watch()
                failure = None
            except KubernetesError as error:
                failure = error
            if had_events or (self._version and time.monotonic() - started_s >= LIVED_S):
                self._backoff.reset()
            await self._pause(failure)

    async def _list(self) -> None:
        """Read all pages; only a complete list replaces what is known."""
        found: dict[str, T] = {}
        query = {**self.resource.query, "limit": str(PAGE_ITEMS)}
        while True:
            page = await self._api.list_page(self.resource, query)
            for item in page["items"]:
                value = self._kept(item)
                if value is not None:
                    found[_name_of(item)] = value
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                break
            query["continue"] = str(metadata["continue"])
        self._version = str(metadata.get("resourceVersion") or "")
        self.items, self.synced, self.problem = found, True, ""
        self._changed()

    async def _watch(self) -> bool:
        """Take the events from the known version on until the server ends the watch; return whether any came."""
        query = {
            **self.resource.query,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        had_events = False
        async with aclosing(self._api.watch(self.resource, query, QUIET_S)) as events:
            async for event in events:
                kind, item = event.get("type"), event["object"]
                if kind == "ERROR":
                    code = item.get("code")
                    call = f"watch {self.resource} in namespace {self.resource.namespace}"
                    self._version = ""  # whatever the error is, only a list is known to help
                    raise KubernetesError(call, code if isinstance(code, int) else 0, str(item.get("message") or ""))
                had_events = True
                self._take(str(kind), item)
                self.problem = self._logged = ""
        self.problem = self._logged = ""
        return had_events

    def _take(self, kind: str, item: Object) -> None:
        version = (item.get("metadata") or {}).get("resourceVersion")
        self._version = str(version or self._version)
        if kind == "BOOKMARK":
            return
        name, value = _name_of(item), None if kind == "DELETED" else self._kept(item)
        if value is not None:
            self.items[name] = value
        else:
            self.items.pop(name, None)
        self._changed()

    def _kept(self, item: Object) -> T | None:
        """Make the value of an object; one that is malformed is left out, and the log says why."""
        try:
            return self._keep(item)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            log_event(
                log, logging.WARNING, "object is left out", kind=str(self.resource),
                namespace=self.resource.namespace, name=_name_of(item), reason=str(error),
            )  # fmt: skip
            return None

    async def _pause(self, failure: KubernetesError | None) -> None:
        """Wait before the next call; not at all, the first time, where the server only ended the watch.

        Every call counts, so that neither watches that end at once nor versions that are always gone become a storm.
        """
        if failure is not None and failure.status == NOT_FOUND and self._optional:
            self._version, self.items, self.synced = "", {}, True
            self._changed()
            await asyncio.sleep(ABSENT_PAUSE_S)
            return
        is_error = failure is not None and failure.status != GONE
        pause_s = self._backoff.next_s() if is_error or self._backoff.num_pauses else 0.0
        self._backoff.num_pauses = max(1, self._backoff.num_pauses)
        if failure is not None and not is_error:
            self._version = ""
            log_event(log, logging.INFO, "version is gone, listing again", kind=str(self.resource))
        elif failure is not None:
            pause_s = max(pause_s, failure.retry_after_s)
            if 400 <= failure.status < 500 and failure.status != TOO_MANY:
                self._version = ""  # without a watch that the server accepts, lists keep the copy up to date
            self.problem = str(failure)
            if self.problem != self._logged:
                self._logged = self.problem
                log_event(log, logging.WARNING, "discovery is interrupted", reason=self.problem, retry_in_s=pause_s)
                self._changed()
        await asyncio.sleep(pause_s)


def _name_of(item: Object) -> str:
    metadata = item.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
