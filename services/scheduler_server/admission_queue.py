"""Requests that wait at this scheduler for an instance that admits them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from scheduler.candidate_ranking import Candidate
from scheduler.candidates import Candidates
from scheduler.holding import Queue, Refusals, pause_s
from scheduler.indicators import ROW_OF
from scheduler.instance_table import InstanceTable
from services.scheduler_server.metrics import SchedulerMetrics
from services.scheduler_server.placement_request import Placement, PlacementRequest

FINISHED = ROW_OF["num_finished_total"]

Attempt = Callable[[bool], Coroutine[Any, Any, Placement | None]]  # None, where it may be held and nobody admits it


@dataclass(slots=True)
class ModelQueue:
    """Who is held of those that the same instances could serve, and how each is told that it is its turn."""

    queue: Queue
    turns: dict[int, asyncio.Event] = field(default_factory=dict)

    def join(self, number: int, until_s: float) -> asyncio.Event:
        """Wait; if that makes too many, the first has to go."""
        self.queue.join(number, until_s)
        turn = self.turns[number] = asyncio.Event()
        if len(self.queue) > self.queue.most:
            self.call_first()
        return turn

    def leave(self, number: int) -> None:
        """Wait no more; it is the next one's turn."""
        self.queue.leave(number)
        del self.turns[number]
        self.call_first()

    def call_first(self) -> None:
        """Have the first look at once."""
        if self.queue:
            self.turns[self.queue.first].set()


class AdmissionQueue:
    """Holds requests first come, first served, a line for each model; only the first of a line asks instances."""

    def __init__(self, table: InstanceTable, measures: SchedulerMetrics, most: int) -> None:
        """Hold nobody yet, and never more than so many in a line."""
        self._most = most
        self._table = table
        self._measures = measures
        self._lines: dict[str, ModelQueue] = {}
        self._numbers = count()
        self._chances = np.random.default_rng()
        self._refusals = Refusals(0)
        self._instance_ids: tuple[str, ...] = ()  # whom these are of

    async def placed(self, wish: PlacementRequest, hold_s: float, attempt: Attempt) -> Placement:
        """Have a request placed as soon as it is its turn and somebody admits it, or its time is up."""
        number = next(self._numbers)
        line = self._lines.setdefault(wish.request.model, ModelQueue(Queue(self._most)))
        if not line.queue and (placement := await attempt(True)) is not None:
            return placement
        return await self._held(wish, number, line, hold_s, attempt)

    async def _held(
        self, wish: PlacementRequest, number: int, line: ModelQueue, hold_s: float, attempt: Attempt
    ) -> Placement:
        joined_s, end = time.monotonic(), "left"
        until_s = wish.taken_s + min(hold_s - wish.waited_s, wish.patience_s)
        turn = line.join(number, until_s)
        self._measures.held.inc()
        try:
            while True:
                now_s = time.monotonic()
                must = line.queue.has_to_go(number, now_s)
                if must or line.queue.first == number:
                    placement = await attempt(not must)
                    if placement is not None:
                        end = "admitted" if placement.candidate.admits else "not_admitted"
                        placement.held_s = now_s - joined_s
                        return placement
                waited_s = time.monotonic() - wish.taken_s
                is_first = line.queue.first == number
                next_s = pause_s(waited_s, self._chances.random()) if is_first else math.inf
                await _pause(turn, min(until_s - wish.taken_s - waited_s, next_s))
        finally:
            line.leave(number)
            self._measures.held.dec()
            self._measures.holds.labels(end).inc()
            self._measures.held_s.observe(time.monotonic() - joined_s)
            self._forget(wish.request.model, line)

    def _forget(self, model: str, line: ModelQueue) -> None:
        """Keep no empty lines: callers may name any model."""
        if not line.queue and self._lines.get(model) is line:
            del self._lines[model]

    def worth_asking(self, known: Candidates) -> Candidates:
        """Leave those whom there is reason to ask."""
        worth = self._of_now().worth_asking(known["num_finished_total"], known.now_s, known.places)
        return known if worth.all() else known.only(np.flatnonzero(worth), "admitted nobody lately")

    def heard(self, candidates: list[Candidate], now_s: float) -> None:
        """Note who admitted a request and who did not."""
        refusals, place_of = self._of_now(), self._table.place_of
        heard = [one for one in candidates if one.is_compared and one.instance_id in place_of]
        places = np.array([place_of[one.instance_id] for one in heard], np.intp)
        refused = np.array([not one.admits for one in heard], np.bool_)
        refusals.note(refused, self._table.known.told[FINISHED, places], now_s, places)

    def _of_now(self) -> Refusals:
        """Forget who refused when instances come or go: those that are there have other places then."""
        instance_ids = self._table.known.instance_ids
        if instance_ids is not self._instance_ids:
            self._refusals, self._instance_ids = Refusals(len(instance_ids)), instance_ids
        return self._refusals


async def _pause(turn: asyncio.Event, seconds: float) -> None:
    """Wait until called, and for so long at most."""
    turn.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(None if seconds == math.inf else max(0.0, seconds)):
            await turn.wait()
