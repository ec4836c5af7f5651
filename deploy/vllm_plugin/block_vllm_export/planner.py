"""Plans a vLLM scheduler's steps with a batching rule of the engine model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .followed_requests import FollowedRequests
from .predictor import steps
from .predictor.batching import batcher_named
from .predictor.compiled import direct
from .predictor.config import EngineConfig
from .predictor.correction import Correction
from .predictor.state import EXPECTED, RUNNING
from .predictor.step_time import StepTime

REMEMBERED = ["memory", "num_clients"]  # what a rule remembers between steps, beside its clients
sum_up = direct(steps.sum_up)
put_in_flight = direct(steps.put_in_flight)


@dataclass(slots=True, eq=False)
class Plan:
    """One step: the requests to preempt, to run and to admit, in order, and the tokens of each; None: one token each.

    `unknown` waits too, but is not planned: vLLM may admit it after those that are.
    """

    victims: list[Any] = field(default_factory=list)
    running: list[Any] = field(default_factory=list)
    admitted: list[Any] = field(default_factory=list)
    unknown: list[Any] = field(default_factory=list)
    tokens: dict[str, int] | None = None


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A launched step, when it was launched, and its uncorrected prediction."""

    output: Any
    launched_s: float
    predicted_s: float


class StepPlanner:
    """Plans a scheduler's steps, and follows those in flight; `followed` has its requests.

    Requests that the rule does not know (streaming sessions) are left to vLLM, with what a plan leaves.
    """

    def __init__(
        self, scheduler: Any, config: EngineConfig, step_time: StepTime, *, corrected: bool, clock: Callable[[], float]
    ) -> None:
        """Compile the rule, and start with an idle engine."""
        self.config = config
        self._scheduler, self._clock, self._corrected = scheduler, clock, corrected
        self._origin_s = clock()
        self._size = config.block_size
        batcher = batcher_named(config.batcher)
        self.rule = direct(batcher.schedule)
        self._count_served = None if batcher.count_served is None else direct(batcher.count_served)
        self.correction = Correction()
        self._in_flight: deque[LaunchedStep] = deque()
        self.followed = FollowedRequests(scheduler, config, step_time, origin_s=self._origin_s)
        self._before = np.zeros(0, np.int64)  # computed tokens of the requests in a step, before it
        self.followed.engine["plans_only"] = 1
        self.rule(self.followed.state)  # compiled, or read from the cache, before the engine serves
        self.followed.steps["num_scheduled"] = 0

    # What the rule remembers between steps.

    @property
    def memory(self) -> np.ndarray:
        """The rule's own numbers."""
        return self.followed.engine["memory"]

    @property
    def clients(self) -> np.ndarray:
        """The clients whose tokens the rule counts."""
        return self.followed.clients[: int(self.followed.engine["num_clients"][0])]

    @property
    def max_clients(self) -> int:
        """The highest number of clients whose tokens the rule counts."""
        return len(self.followed.clients)

    # What the scheduler reports.

    def launched(self, output: Any, plan: Plan | None) -> None:
        """Follow a step that vLLM has scheduled."""
        followed = self.followed
        scheduled = output.num_scheduled_tokens
        if plan is None or not self._is_as_planned(scheduled, plan):
            self._sum_up(scheduled)
        if plan is None:
            followed.follow_unplanned(output, self._now_s())
        else:
            for request in plan.victims:
                followed.preempted(request)
            for request in plan.admitted:
                if request.status.name == "RUNNING":
                    followed.admitted(request)
        if self._count_served is not None:
            self._count_served(followed.state)
        now_s = float(followed.engine["now_s"][0])
        put_in_flight(followed.state, now_s)
        step = self.last_step
        predicted_s = float(step["end_s"] - step["start_s"]) / float(followed.engine["pace"][0])
        self._in_flight.append(LaunchedStep(output, now_s, predicted_s))

    def retired(self, output: Any) -> None:
        """Follow a step whose output vLLM has processed, and correct the step time by it."""
        followed = self.followed
        now_s = self._now_s()
        while any(step.output is output for step in self._in_flight):
            step = self._drop_oldest()
            if step.output is not output:
                continue  # its output never came
            start_s, followed.last_end_s = max(step.launched_s, followed.last_end_s), now_s
            if self._corrected and output.num_scheduled_tokens:
                self.correction = self.correction.observe(predicted_s=step.predicted_s, real_s=now_s - start_s)
                followed.engine["pace"] = self.correction.factor
            if self._in_flight:
                self._start_now(now_s)

    @property
    def last_step(self) -> np.ndarray:
        """The step that was launched last, in the engine model."""
        return self.followed.steps[self._index(-1)]

    def _now_s(self) -> float:
        return self._clock() - self._origin_s

    def _start_now(self, now_s: float) -> None:
        """Start the step in flight now, whenever the end of the one before was predicted."""
        step = self.last_step
        step["start_s"], step["end_s"] = now_s, now_s + step["end_s"] - step["start_s"]

    # The plan.

    def plan(self) -> Plan | None:
        """Plan the next step; None where the rule plans nothing, and vLLM should decide alone."""
        followed = self.followed
        while len(self._in_flight) >= self.config.pipeline_depth:
            self._drop_oldest()  # its output never came
        followed.follow()
        engine = followed.engine
        engine["now_s"] = self._now_s()
        index = self._index(0)
        memory, clients = engine[REMEMBERED].copy(), followed.clients[: int(engine["num_clients"][0])].copy()
        while True:
            followed.steps["num_scheduled"][index] = followed.steps["num_preempted"][index] = 0
            engine["num_pending"] = 0
            self.rule(followed.state)
            if not self._learn_blocks(index):
                return self._made(index)
            engine[REMEMBERED] = memory
            followed.clients[: len(clients)] = clients

    def _made(self, index: int) -> Plan | None:
        """Read the plan from the state."""
        followed = self.followed
        count = int(followed.steps["num_scheduled"][index])
        if count == 0 and not self._in_flight:
            return None  # vLLM's core would ask again without end
        entries = followed.batch[index, :count]
        victims = [followed.requests[slot] for slot in self._victims(index)]
        running = self._scheduler.running
        slots = entries["slot"]
        if not victims and count == len(running) and self._is_decode_of_all(entries):
            return Plan(unknown=followed.unknown())  # in vLLM's own order
        plan = Plan(victims=victims, unknown=followed.unknown(), tokens={})
        runs = followed.rows["status"][slots] == RUNNING
        for slot, tokens, is_running in zip(slots.tolist(), entries["tokens"].tolist(), runs.tolist(), strict=True):
            request = followed.requests[slot]
            (plan.running if is_running else plan.admitted).append(request)
            plan.tokens[request.request_id] = tokens  # type: ignore[index]
        return plan

    def _is_decode_of_all(self, entries: np.ndarray) -> bool:
        decodes = (entries["tokens"] == 1) & (entries["sampled"] == 1)
        return bool((decodes & (entries["slot"] == self.followed.state.running[: len(entries)])).all())

    def _victims(self, index: int) -> list[int]:
        victims: list[int] = self.followed.state.preempted[: int(self.followed.steps["num_preempted"][index])].tolist()
        return victims

    def _learn_blocks(self, index: int) -> bool:
        """Look up what the plan assumed about blocks; return whether it was wrong, so that the plan must be made again.

        Whole prefixes are looked up only for requests that the plan would admit, and shared blocks only of victims.
        """
        followed = self.followed
        was_wrong = False
        for slot in followed.state.pending[: int(followed.engine["num_pending"][0])].tolist():
            num_hits, num_idle = self._hits_of(followed.requests[slot])
            was_wrong = was_wrong or num_hits > 0
            followed.rows["num_hashes"][slot], followed.rows["full_blocks"][slot] = num_hits, num_idle
            followed.looked_up.append(slot)
        if followed.caches:
            for slot in self._victims(index):
                held = followed.blocks_of.get(followed.requests[slot].request_id, ())
                own = sum(block.ref_cnt == 1 for block in held)
                was_wrong = was_wrong or own != followed.rows["full_blocks"][slot]
                followed.rows["full_blocks"][slot] = own
        return was_wrong

    def _hits_of(self, request: Any) -> tuple[int, int]:
        found, num_tokens, _ = self._scheduler.kv_cache_manager.get_computed_blocks(request)
        hits = found.blocks[0] if num_tokens else ()
        return len(hits), sum(block.ref_cnt == 0 for block in hits)

    def _index(self, ahead: int) -> int:
        """Return the row of the step that is planned, or of one before it."""
        return int(self.followed.engine["oldest"][0] + self.followed.engine["num_in_flight"][0] + ahead) % 2

    def _drop_oldest(self) -> LaunchedStep:
        self.followed.engine["oldest"] = (self.followed.engine["oldest"] + 1) % 2
        self.followed.engine["num_in_flight"] -= 1
        return self._in_flight.popleft()

    # The duration of the step.

    def _is_as_planned(self, scheduled: dict[str, int], plan: Plan) -> bool:
        if plan.tokens is None:
            return True
        size, hits = self._size, self.followed.rows["num_hashes"]
        return scheduled == plan.tokens and all(
            one.num_computed_tokens - scheduled[one.request_id] == max(0, hits[one.block_slot]) * size
            for one in plan.admitted
        )

    def _sum_up(self, scheduled: dict[str, int]) -> None:
        """Sum up what the duration of a step depends on that is not the planned one."""
        followed, index, count = self.followed, self._index(0), 0
        if len(self._before) < len(followed.requests):
            self._before = np.zeros(len(followed.requests), np.int64)
        for name, tokens in scheduled.items():
            if (slot := followed.slots.get(name)) is None:
                continue
            request = followed.requests[slot]
            self._before[count] = request.num_computed_tokens - tokens
            followed.batch[index, count] = (slot, tokens, 0 if request.is_prefill_chunk else 1, 0, EXPECTED, EXPECTED)
            count += 1
        followed.steps["num_scheduled"][index] = count
        sum_up(followed.state, self._before)


def wall_clock() -> float:
    """Return the clock of vLLM's arrival times."""
    return time.time()
