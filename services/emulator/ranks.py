"""The data-parallel ranks of an emulated engine: one server in front of several engine models.

A request goes to the rank that its header names, or to one that vLLM's own balancing would choose (0.32,
`DPLBAsyncMPClient.get_core_engine_for_request`). Ranks of a model with experts step together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictor.data_parallel import LockstepRules
from predictor.engine import Engine
from predictor.lockstep import LockstepGroup
from services.emulator.clock import EngineClock
from services.emulator.driver import Driver
from services.emulator.errors import VllmError
from services.emulator.jobs import Job
from services.emulator.kv_transfers import Fetch
from services.emulator.openai import ParsedRequest

log = logging.getLogger(__name__)

COUNTS_AGE_S = 0.1  # for which vLLM's front end uses the counts of its coordinator
PENALTY, FROM_USAGE = 6.0, 0.5  # of waiting requests, where more of the KV cache is in use


@dataclass(slots=True)
class RankCounts:
    """What the balancing knows of one rank, as of the last report; its own choices since are counted as waiting."""

    num_waiting: int = 0
    num_running: int = 0
    kv_cache_usage: float = 0.0

    def score(self, num_unfinished: int) -> float:
        """Return the load of a rank with this many requests of this server."""
        score = float(max(num_unfinished, self.num_waiting + self.num_running))
        return score + self.num_waiting * PENALTY * max(0.0, self.kv_cache_usage - FROM_USAGE)


def at_rank(request: ParsedRequest, rank: int | None) -> ParsedRequest:
    """Return a request for a rank, which serves all its responses; without a rank, each is balanced."""
    if rank is None:
        return request
    choices = tuple(replace(one, data_parallel_rank=rank) for one in request.choices)
    return replace(request, data_parallel_rank=rank, choices=choices)


class RankDrivers:
    """The drivers of an engine's ranks, used like one driver."""

    connector = None  # ranks pass no KV blocks on

    def __init__(self, drivers: Sequence[Driver], lockstep: LockstepRules | None) -> None:
        """Combine the drivers of all ranks, in their order; with `lockstep` they step together."""
        self.drivers = list(drivers)
        self._driver_of: dict[Job, Driver] = {}
        self._counts = [RankCounts() for _ in drivers]
        self._counted_s = -math.inf
        self._first = 0  # rank that is looked at first, so that equal ones take turns
        self._lockstep = None if lockstep is None else LockstepDrivers(self.drivers, lockstep)

    @property
    def failure(self) -> VllmError | None:
        """Why the engine has failed; one rank is enough."""
        return next((one.failure for one in self.drivers if one.failure is not None), None)

    @property
    def num_jobs(self) -> int:
        """Return the number of requests that have not ended."""
        return sum(one.num_jobs for one in self.drivers)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.drivers)

    def require_room(self, request: ParsedRequest) -> None:
        """Refuse a request that the engine cannot take now."""
        if self.failure is not None:
            raise self.failure
        rank = request.data_parallel_rank
        if rank is None:
            rank = min(range(self.num_ranks), key=lambda one: self.drivers[one].num_jobs)
        self.drivers[rank].require_room(request)

    @property
    def engine(self) -> Engine:
        """Return the engine model of the first rank; all have the same configuration."""
        return self.drivers[0].engine

    @property
    def clock(self) -> EngineClock:
        """Return the clock of the first rank."""
        return self.drivers[0].clock

    def submit(self, request: ParsedRequest, fetch: Fetch | None = None, *, arrived_s: float | None = None) -> Job:
        """Add a request to its rank now; VllmError where it cannot be served.

        `arrived_s` is when the client's request arrived, by the clock of the first rank.
        """
        if self.failure is not None:
            raise self.failure
        rank = request.data_parallel_rank
        driver = self.drivers[self._balanced() if rank is None else rank]
        if arrived_s is not None:
            arrived_s += driver.clock.now_s() - self.clock.now_s()
        job = driver.submit(request, fetch, arrived_s=arrived_s)
        self._driver_of[job] = driver
        return job

    def abort(self, job: Job) -> None:
        """Abort a request; no effect on one that is over."""
        driver = self._driver_of.pop(job, None)
        if driver is not None:
            driver.abort(job)

    def hang(self, *, hangs: bool) -> None:
        """Stop the engine, or let it continue."""
        for one in self.drivers:
            one.hang(hangs=hangs)

    def load_adapter(self, name: str) -> None:
        """Bring an adapter into the memory of all ranks."""
        for driver in self.drivers:
            driver.load_adapter(name)

    def slow(self, factor: float) -> None:
        """Multiply the times of all steps."""
        for one in self.drivers:
            one.slow(factor)

    async def run(self) -> None:
        """Run all ranks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._lockstep is not None:
                tasks.create_task(self._lockstep.run())
                return
            for one in self.drivers:
                tasks.create_task(one.run())

    def close(self) -> None:
        """Remove the state files."""
        for one in self.drivers:
            one.close()

    def _balanced(self) -> int:
        """Return the rank that vLLM's own balancing would choose."""
        now_s = time.monotonic()
        if now_s - self._counted_s >= COUNTS_AGE_S:
            self._counted_s = now_s
            for counts, driver in zip(self._counts, self.drivers, strict=True):
                gauges = driver.gauges()
                counts.num_waiting, counts.num_running = gauges.num_waiting, gauges.num_running
                counts.kv_cache_usage = gauges.kv_cache_usage
        in_turn = [(self._first + place) % self.num_ranks for place in range(self.num_ranks)]
        chosen = min(in_turn, key=lambda rank: self._counts[rank].score(self.drivers[rank].num_jobs))
        self._counts[chosen].num_waiting += 1
        self._first = (self._first + 1) % self.num_ranks
        return chosen


class LockstepDrivers:
    """Runs the drivers of ranks that step together, on the clock that they share."""

    def __init__(self, drivers: Sequence[Driver], rules: LockstepRules) -> None:
        """Combine drivers of idle engines."""
        self._drivers = list(drivers)
        self._clock: EngineClock = self._drivers[0].clock
        self._group = LockstepGroup([one.engine for one in drivers], rules)
        self._wake_up: asyncio.Event = asyncio.Event()
        for one in self._drivers:
            one.woken = self._wake_up.set

    async def run(self) -> None:
        """Run all ranks until cancelled."""
        try:
            while True:
                self._wake_up.clear()
                self._update()
                await self._next_event()
        except Exception as error:  # noqa: BLE001 - each request gets it
            for one in self._drivers:
                one.fail(error)

    async def _next_event(self) -> None:
        delay_s = None
        if self._group.next_end_s < math.inf and not self._clock.is_held:
            delay_s = max(0.0, self._clock.wall_s(self._group.next_end_s) - time.monotonic())
        try:
            async with asyncio.timeout(delay_s):
                await self._wake_up.wait()
        except TimeoutError:
            pass

    def _update(self) -> None:
        if not self._clock.is_held:
            if self._group.next_end_s < math.inf:
                self._drivers[0].skip_stopped_time(self._group.next_end_s)
            now_s = self._clock.now_s()
            for one in self._drivers:
                one.arrive_by(now_s)
            self._advance(now_s)
        for one in self._drivers:
            one.hand_out()

    def _advance(self, now_s: float) -> None:
        """Run the ranks one pass at a time: each step has its own pace and is recorded."""
        while True:
            for one in self._drivers:
                one.steps.set_next_pace()
            planned = self._group.next_pass(now_s)
            for rank, one in enumerate(self._drivers):
                one.steps.record(has_launched=planned is not None and planned.busy[rank])
            if planned is None:
                return
