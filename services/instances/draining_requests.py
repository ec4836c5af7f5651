"""The requests of this process by instance; those at an instance that drains are asked to leave at its deadline."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from services.instances.drains import Drain
from services.logs import log_event
from services.supervised_task import supervised

log = logging.getLogger(__name__)

TICK_S = 0.05
RETRY_S = 1.0  # after which a request that could not leave is asked again
MAX_MOVING = 16  # requests that leave one instance at the same time: each of them is a prefill elsewhere
REMOVED = "the instance is removed, and the request could not move in time"

Counted = Callable[[str], None]


class MovableRequest:
    """One request at one instance, from when it is sent until `end`."""

    __slots__ = ("_forced", "_leave", "_of", "ask_again_s", "is_moving", "reasons")

    def __init__(
        self, of: dict[MovableRequest, None], leave: Callable[[], None] | None, forced: Callable[[], None]
    ) -> None:
        """Track a request: `leave` asks it to move, None where it cannot; `forced` ends it."""
        self._of, self._leave, self._forced = of, leave, forced
        self.is_moving = False
        self.ask_again_s = -math.inf
        self.reasons: set[str] = set()  # for which it could not leave
        of[self] = None

    def set_leave(self, leave: Callable[[], None] | None) -> None:
        """Replace what asks the request to leave; None where it cannot."""
        self._leave, self.is_moving = leave, False

    def ask(self, now_s: float) -> bool:
        """Ask the request to leave, unless it is on its way, or could not leave a moment ago."""
        if self._leave is None or self.is_moving or now_s < self.ask_again_s:
            return False
        self.is_moving, self.ask_again_s = True, now_s + RETRY_S
        self._leave()
        return True

    def force(self) -> None:
        """End the request."""
        self._forced()

    def end(self) -> None:
        """The request is no longer there."""
        self._of.pop(self, None)


class DrainingRequests:
    """Knows which instances drain, and asks their requests to leave, some at a time, when it is time.

    A request that cannot leave goes on where it is, and is asked again.
    """

    def __init__(self, count_unmoved: Counted = lambda _: None, *, clock: Callable[[], float] = time.time) -> None:
        """Start without requests; `count_unmoved` is called with each reason for which a request cannot leave, once."""
        self._count_unmoved = count_unmoved
        self._clock = clock
        self._at: dict[str, dict[MovableRequest, None]] = {}
        self._drains: dict[str, Drain] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def draining(self) -> frozenset[str]:
        """The ids of the instances that drain."""
        return frozenset(self._drains)

    def num_at(self, instance_id: str) -> int:
        """Return the number of requests at an instance."""
        return len(self._at.get(instance_id, ()))

    def enter(self, instance_id: str, leave: Callable[[], None] | None, forced: Callable[[], None]) -> MovableRequest:
        """Count a request at an instance until its `end`."""
        at = self._at.get(instance_id)
        if at is None:
            if len(self._at) > 4096:  # instances that are gone
                self._at = {name: requests for name, requests in self._at.items() if requests}
            at = self._at[instance_id] = {}
        return MovableRequest(at, leave, forced)

    def cannot_move(self, request: MovableRequest, reason: str) -> None:
        """Note why a request that was asked to leave does not."""
        request.is_moving = False
        if reason not in request.reasons:
            request.reasons.add(reason)
            self._count_unmoved(reason)

    def follow(self, drains: Mapping[str, Drain]) -> None:
        """Replace all drains: a changed one restarts, and an instance that is not among them drains no longer."""
        for name in [name for name, drain in self._drains.items() if drains.get(name) != drain]:
            del self._drains[name]
            if (task := self._tasks.pop(name, None)) is not None:
                task.cancel()
        for name, drain in drains.items():
            if name in self._drains:
                continue
            self._drains[name] = drain
            if min(drain.deadline_unix_s if drain.migrate else math.inf, drain.force_unix_s) < math.inf:
                work = supervised(f"drain of {name}", lambda name=name, drain=drain: self._drain(name, drain))  # type: ignore[misc]
                self._tasks[name] = asyncio.create_task(work)

    async def _drain(self, name: str, drain: Drain) -> None:
        """Ask, from the deadline on, and end what is left, from then on."""
        first_s = min(drain.deadline_unix_s if drain.migrate else math.inf, drain.force_unix_s)
        while (left_s := first_s - self._clock()) > 0:  # noqa: ASYNC110 - the clock may be set
            await asyncio.sleep(min(left_s, 60.0))
        log_event(log, logging.INFO, "requests leave", instance=name, requests=self.num_at(name))
        while True:
            requests, now_s = list(self._at.get(name, ())), time.monotonic()
            if self._clock() >= drain.force_unix_s:
                for request in requests:
                    request.force()
            elif drain.migrate:
                room = MAX_MOVING - sum(request.is_moving for request in requests)
                for request in requests:
                    room -= room > 0 and request.ask(now_s)
            await asyncio.sleep(TICK_S)

    async def close(self) -> None:
        """Ask nothing any more."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
