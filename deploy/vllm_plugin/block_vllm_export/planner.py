"""Plans a vLLM scheduler's steps with a batching rule of the engine model, in a state that follows the scheduler's."""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .predictor import steps
from .predictor.batching import batcher_named
from .predictor.compiled import direct
from .predictor.config import EngineConfig
from .predictor.correction import Correction
from .predictor.engine import Engine
from .predictor.state import EXPECTED, NONE, RUNNING, WAITING, State, new_request, widen
from .predictor.step_time import StepTime
from .writer import tenant_number
from .xargs import facts_in

log = logging.getLogger("vllm.block_export")

UNKNOWN_HITS = -1
REMEMBERED = ["memory", "num_clients"]  # what a rule remembers between steps, beside its clients
BLOCKED = ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",)
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
    """Follows a scheduler's requests, and plans its steps.

    Requests that the rule does not know (streaming sessions) are left to vLLM, with what a plan leaves.
    """

    def __init__(
        self, scheduler: Any, config: EngineConfig, step_time: StepTime, *, corrected: bool, clock: Callable[[], float]
    ) -> None:
        """Compile the rule, and start with an idle engine."""
        self.config = config
        self.num_bad_facts = 0
        self._scheduler, self._clock, self._corrected = scheduler, clock, corrected
        self._origin_s = clock()
        self._caches = bool(config.enable_prefix_caching)
        self._size = config.block_size
        self._by_priority, self._is_unsorted = config.scheduling_policy == "priority", False
        self._pool = scheduler.kv_cache_manager.block_pool
        self._blocks_of = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        batcher = batcher_named(config.batcher)
        self._rule = direct(batcher.schedule)
        self._count_served = None if batcher.count_served is None else direct(batcher.count_served)
        self._correction = Correction()
        self._requests: list[Any] = []  # by slot
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._blocked: dict[Any, None] = {}  # requests that cannot be admitted yet, and have no place in the queue
        self._stale: dict[Any, None] = {}  # preempted requests with output in flight
        self._new: list[Any] = []
        self._in_flight: deque[LaunchedStep] = deque()
        self._last_end_s = -math.inf
        self._serial = 0
        self._looked_up: list[int] = []  # slots whose prefixes the last plan has looked up
        self._use(Engine(config, step_time, track_blocks=False).state)
        self._engine["plans_only"] = 1
        self._rule(self._state)  # compiled, or read from the cache, before the engine serves
        self._steps["num_scheduled"] = 0

    # What the rule remembers between steps.

    @property
    def memory(self) -> np.ndarray:
        """The rule's own numbers."""
        return self._engine["memory"]

    @property
    def clients(self) -> np.ndarray:
        """The clients whose tokens the rule counts."""
        return self._clients[: int(self._engine["num_clients"][0])]

    @property
    def max_clients(self) -> int:
        """The highest number of clients whose tokens the rule counts."""
        return len(self._clients)

    # What the scheduler reports.

    def added(self, request: Any) -> None:
        """Note a request that has arrived."""
        self._new.append(request)

    def knows(self, request: Any) -> bool:
        """Return whether the rule plans a request."""
        return getattr(request, "block_slot", NONE) != NONE

    def _knows_all(self) -> bool:
        return len(self._slots) == len(self._scheduler.requests)

    def launched(self, output: Any, plan: Plan | None) -> None:
        """Follow a step that vLLM has scheduled."""
        scheduled = output.num_scheduled_tokens
        if plan is None or not self._is_as_planned(scheduled, plan):
            self._sum_up(scheduled)
        if plan is None:
            self._follow_unplanned(output)
        else:
            for request in plan.victims:
                self._to_front(request)
            for request in plan.admitted:
                if request.status.name == "RUNNING":
                    self._leave_waiting(request.block_slot)
                    self._rows["status"][request.block_slot] = RUNNING
        if self._count_served is not None:
            self._count_served(self._state)
        now_s = float(self._engine["now_s"][0])
        put_in_flight(self._state, now_s)
        step = self._steps[self._index(-1)]
        predicted_s = float(step["end_s"] - step["start_s"]) / float(self._engine["pace"][0])
        self._in_flight.append(LaunchedStep(output, now_s, predicted_s))

    def retired(self, output: Any) -> None:
        """Follow a step whose output vLLM has processed, and correct the step time by it."""
        now_s = self._clock() - self._origin_s
        while any(step.output is output for step in self._in_flight):
            step = self._drop_oldest()
            if step.output is not output:
                continue  # its output never came
            start_s, self._last_end_s = max(step.launched_s, self._last_end_s), now_s
            if self._corrected and output.num_scheduled_tokens:
                self._correction = self._correction.observe(predicted_s=step.predicted_s, real_s=now_s - start_s)
                self._engine["pace"] = self._correction.factor
            if self._in_flight:
                self._start_now(now_s)

    def _start_now(self, now_s: float) -> None:
        """Start the step in flight now, whenever the end of the one before was predicted."""
        step = self._steps[self._index(-1)]
        step["start_s"], step["end_s"] = now_s, now_s + step["end_s"] - step["start_s"]

    # The plan.

    def plan(self) -> Plan | None:
        """Plan the next step; None where the rule plans nothing, and vLLM should decide alone."""
        self._follow()
        engine = self._engine
        engine["now_s"] = self._clock() - self._origin_s
        index = self._index(0)
        memory, clients = engine[REMEMBERED].copy(), self._clients[: int(engine["num_clients"][0])].copy()
        while True:
            self._steps["num_scheduled"][index] = self._steps["num_preempted"][index] = 0
            engine["num_pending"] = 0
            self._rule(self._state)
            if not self._learn_blocks(index):
                return self._made(index)
            engine[REMEMBERED] = memory
            self._clients[: len(clients)] = clients

    def _made(self, index: int) -> Plan | None:
        """Read the plan from the state."""
        count = int(self._steps["num_scheduled"][index])
        if count == 0 and not self._in_flight:
            return None  # vLLM's core would ask again without end
        entries = self._batch[index, :count]
        victims = [self._requests[slot] for slot in self._victims(index)]
        running = self._scheduler.running
        slots = entries["slot"]
        if not victims and count == len(running) and self._is_decode_of_all(entries):
            return Plan(unknown=self._unknown())  # in vLLM's own order
        plan = Plan(victims=victims, unknown=self._unknown(), tokens={})
        runs = self._rows["status"][slots] == RUNNING
        for slot, tokens, is_running in zip(slots.tolist(), entries["tokens"].tolist(), runs.tolist(), strict=True):
            request = self._requests[slot]
            (plan.running if is_running else plan.admitted).append(request)
            plan.tokens[request.request_id] = tokens  # type: ignore[index]
        return plan

    def _unknown(self) -> list[Any]:
        """Return the waiting requests that the rule does not plan."""
        if self._knows_all():
            return []
        return [one for one in self._scheduler.waiting if not self.knows(one)]

    def _is_decode_of_all(self, entries: np.ndarray) -> bool:
        decodes = (entries["tokens"] == 1) & (entries["sampled"] == 1)
        return bool((decodes & (entries["slot"] == self._state.running[: len(entries)])).all())

    def _victims(self, index: int) -> list[int]:
        victims: list[int] = self._state.preempted[: int(self._steps["num_preempted"][index])].tolist()
        return victims

    def _learn_blocks(self, index: int) -> bool:
        """Look up what the plan assumed about blocks; return whether it was wrong, so that the plan must be made again.

        Whole prefixes are looked up only for requests that the plan would admit, and shared blocks only of victims.
        """
        was_wrong = False
        for slot in self._state.pending[: int(self._engine["num_pending"][0])].tolist():
            num_hits, num_idle = self._hits_of(self._requests[slot])
            was_wrong = was_wrong or num_hits > 0
            self._rows["num_hashes"][slot], self._rows["full_blocks"][slot] = num_hits, num_idle
            self._looked_up.append(slot)
        if self._caches:
            for slot in self._victims(index):
                held = self._blocks_of.get(self._requests[slot].request_id, ())
                own = sum(block.ref_cnt == 1 for block in held)
                was_wrong = was_wrong or own != self._rows["full_blocks"][slot]
                self._rows["full_blocks"][slot] = own
        return was_wrong

    def _hits_of(self, request: Any) -> tuple[int, int]:
        found, num_tokens, _ = self._scheduler.kv_cache_manager.get_computed_blocks(request)
        hits = found.blocks[0] if num_tokens else ()
        return len(hits), sum(block.ref_cnt == 0 for block in hits)

    # The state of the engine model.

    def _use(self, state: State) -> None:
        """Work with these arrays."""
        num_old, num_new = len(self._requests), len(state.requests)
        self._state = state
        self._engine, self._rows, self._facts, self._steps, self._batch = (
            one.view(np.ndarray) for one in (state.engine, state.requests, state.facts, state.steps, state.batch)
        )
        self._clients = state.clients.view(np.ndarray)
        self._requests += [None] * (num_new - num_old)
        self._free_slots[:0] = range(num_new - 1, num_old - 1, -1)
        self._before = np.zeros(num_new, np.int64)

    def _index(self, ahead: int) -> int:
        """Return the row of the step that is planned, or of one before it."""
        return int(self._engine["oldest"][0] + self._engine["num_in_flight"][0] + ahead) % 2

    def _drop_oldest(self) -> LaunchedStep:
        self._engine["oldest"] = (self._engine["oldest"] + 1) % 2
        self._engine["num_in_flight"] -= 1
        return self._in_flight.popleft()

    def _follow(self) -> None:
        """Bring the state up to date with the scheduler's requests."""
        scheduler, engine = self._scheduler, self._engine
        while len(self._in_flight) >= self.config.pipeline_depth:
            self._drop_oldest()  # its output never came
        self._forget_ended(scheduler.finished_req_ids)
        for request in self._new:
            if scheduler.requests.get(request.request_id) is request and not request.is_finished():
                self._enter(request)
        self._new.clear()
        for request in [one for one in self._blocked if scheduler._handle_blocked_waiting_request(one)]:  # noqa: SLF001
            del self._blocked[request]
            self._join_waiting(request.block_slot)
        for slot in self._looked_up:
            self._rows["num_hashes"][slot] = UNKNOWN_HITS
        self._looked_up.clear()
        if scheduler.reset_preempted_req_ids or len(scheduler.waiting) != engine["num_waiting"][0] + len(self._blocked):
            self._rebuild_waiting()
        if self._by_priority and self._is_unsorted:
            self._sort_waiting()
        self._follow_stale()
        self._follow_running()
        engine["num_free_blocks"] = self._pool.get_num_free_blocks()

    def _follow_unplanned(self, output: Any) -> None:
        """Follow a step without a plan, before which `_follow` may not have run: vLLM was paused."""
        self._engine["now_s"] = self._clock() - self._origin_s
        self._forget_ended(output.finished_req_ids)
        self._rebuild_waiting()

    def _follow_running(self) -> None:
        running = self._scheduler.running
        known = running if self._knows_all() else [one for one in running if self.knows(one)]
        count = len(known)
        self._engine["num_running"] = count
        if not count:
            return
        slots = _column([one.block_slot for one in known])
        self._state.running[:count] = slots
        rows = self._rows
        outputs = _column([one.num_output_tokens for one in known])
        has_first = (outputs > 0) & (rows["first_token_s"][slots] < 0)
        if has_first.any():
            rows["first_token_s"][slots[has_first]] = self._last_end_s
        rows["output_tokens"][slots] = outputs
        rows["computed_tokens"][slots] = _column([one.num_computed_tokens for one in known])
        rows["placeholders"][slots] = _column([one.num_output_placeholders for one in known])
        blocks_of = self._blocks_of
        held = _column([len(blocks_of[one.request_id]) for one in known])
        rows["num_blocks"][slots] = rows["full_blocks"][slots] = held

    def _follow_stale(self) -> None:
        """Follow preempted requests whose output in flight arrives."""
        for request in list(self._stale):
            slot = getattr(request, "block_slot", NONE)
            if slot == NONE or request.status.name == "RUNNING":
                del self._stale[request]
                continue
            stale = 0 if request.drop_stale_output else request.num_stale_output_tokens
            self._rows["stale_tokens"][slot] = stale
            self._rows["output_tokens"][slot] = request.num_output_tokens
            if request.num_output_tokens and self._rows["first_token_s"][slot] < 0:
                self._rows["first_token_s"][slot] = self._last_end_s
            if not stale:
                del self._stale[request]

    def _enter(self, request: Any) -> None:
        """Give a new request a slot."""
        if request.resumable:
            return
        if not self._free_slots:
            self._use(widen(self._state, num_slots=len(self._requests) + 1, blocks_per_request=0, num_contents=0))
        slot = self._free_slots.pop()
        self._requests[slot], self._slots[request.request_id] = request, slot
        request.block_slot = slot
        columns = self._facts_of(request)
        max_tokens = max(1, min(int(request.max_tokens), self.config.max_model_len - request.num_prompt_tokens))
        self._serial += 1
        self._rows[slot] = new_request(
            prompt_tokens=request.num_prompt_tokens,
            final_tokens=max_tokens,
            max_tokens=max_tokens,
            priority=int(request.priority),
            tie_break=self._serial,
            arrival_s=request.arrival_time - self._origin_s,
            num_hashes=UNKNOWN_HITS if self._caches else 0,
            serial=self._serial,
            status=WAITING,
        )
        tag = columns.get("tag_tokens", math.nan)
        if 0 < tag < max_tokens:
            self._rows["expected_tokens"][slot] = round(tag)
        client = columns.get("client_id", "")
        self._facts[slot] = (
            columns.get("ttft_slo_s", math.nan), columns.get("tpot_slo_s", math.nan), columns.get("weight", 1.0),
            tenant_number(client), columns.get("request_class", 0), 0, 0,
        )  # fmt: skip
        if request.status.name in BLOCKED:
            self._blocked[request] = None
        else:
            self._join_waiting(slot)

    def _facts_of(self, request: Any) -> dict[str, Any]:
        """Return what the client has sent about its request; count what is impossible, and ignore it."""
        columns, errors = facts_in(getattr(request.sampling_params, "extra_args", None) or {})
        for error in errors:
            self.num_bad_facts += 1
            if math.log10(self.num_bad_facts).is_integer():
                log.warning(
                    "block-vllm-export: request %s: %s; it is ignored (%d so far)",
                    request.request_id, error, self.num_bad_facts,
                )  # fmt: skip
        return columns

    def _forget_ended(self, names: Iterable[str]) -> None:
        for name in names:
            slot = self._slots.get(name)
            if slot is not None and self._requests[slot].is_finished():  # and not a new request with an old name
                del self._slots[name]
                self._forget(slot)

    def _forget(self, slot: int) -> None:
        request = self._requests[slot]
        if request in self._blocked:
            del self._blocked[request]
        elif self._rows["status"][slot] == WAITING:
            self._leave_waiting(slot)
        self._stale.pop(request, None)
        request.block_slot, self._requests[slot] = NONE, None
        self._free_slots.append(slot)

    # The waiting queue, whose head is always at index 0, in vLLM's order.

    def _join_waiting(self, slot: int) -> None:
        count = int(self._engine["num_waiting"][0])
        self._state.waiting[count] = slot
        self._engine["num_waiting"] = count + 1
        self._is_unsorted = True

    def _leave_waiting(self, slot: int) -> None:
        count = int(self._engine["num_waiting"][0])
        waiting = self._state.waiting
        (places,) = np.nonzero(waiting[:count] == slot)
        if len(places):
            waiting[places[0] : count - 1] = waiting[places[0] + 1 : count]
            self._engine["num_waiting"] = count - 1

    def _to_front(self, request: Any) -> None:
        """Put a preempted request first."""
        slot = request.block_slot
        count = int(self._engine["num_waiting"][0])
        self._state.waiting[1 : count + 1] = self._state.waiting[:count].copy()
        self._state.waiting[0] = slot
        self._engine["num_waiting"] = count + 1
        self._is_unsorted = True
        self._wait_again(request)

    def _sort_waiting(self) -> None:
        count = int(self._engine["num_waiting"][0])
        slots = self._state.waiting[:count]
        rows = self._rows[slots]
        slots[:] = slots[np.lexsort((rows["tie_break"], rows["arrival_s"], rows["priority"]))]
        self._is_unsorted = False

    def _wait_again(self, request: Any) -> None:
        rows, slot = self._rows, request.block_slot
        rows["status"][slot] = WAITING
        rows["computed_tokens"][slot] = rows["placeholders"][slot] = rows["num_blocks"][slot] = 0
        rows["full_blocks"][slot] = 0
        rows["num_hashes"][slot] = UNKNOWN_HITS if self._caches else 0
        rows["num_preemptions"][slot] = request.num_preemptions
        self._stale[request] = None

    def _rebuild_waiting(self) -> None:
        """Read both queues again, after vLLM has changed them without a plan."""
        for request in self._scheduler.running:
            if self.knows(request):
                self._rows["status"][request.block_slot] = RUNNING
        waiting = [one for one in self._scheduler.waiting if self.knows(one) and one not in self._blocked]
        for request in waiting:
            if self._rows["status"][request.block_slot] == RUNNING:
                self._wait_again(request)
        self._state.waiting[: len(waiting)] = [one.block_slot for one in waiting]
        self._engine["num_waiting"] = len(waiting)

    # The duration of the step.

    def _is_as_planned(self, scheduled: dict[str, int], plan: Plan) -> bool:
        if plan.tokens is None:
            return True
        size, hits = self._size, self._rows["num_hashes"]
        return scheduled == plan.tokens and all(
            one.num_computed_tokens - scheduled[one.request_id] == max(0, hits[one.block_slot]) * size
            for one in plan.admitted
        )

    def _sum_up(self, scheduled: dict[str, int]) -> None:
        """Sum up what the duration of a step depends on that is not the planned one."""
        index, count = self._index(0), 0
        for name, tokens in scheduled.items():
            if (slot := self._slots.get(name)) is None:
                continue
            request = self._requests[slot]
            self._before[count] = request.num_computed_tokens - tokens
            self._batch[index, count] = (slot, tokens, 0 if request.is_prefill_chunk else 1, 0, EXPECTED, EXPECTED)
            count += 1
        self._steps["num_scheduled"][index] = count
        sum_up(self._state, self._before)


def _column(values: list[int]) -> np.ndarray:
    return np.frombuffer(array("i", values), np.int32)


def wall_clock() -> float:
    """Return the clock of vLLM's arrival times."""
    return time.time()
