"""The engine model's state of a vLLM scheduler's requests, which is brought up to date before each plan."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from .predictor.config import EngineConfig
from .predictor.engine import Engine
from .predictor.state import NONE, RUNNING, WAITING, State, new_request
from .predictor.state_allocation import widen
from .predictor.step_time import StepTime
from .writer import tenant_number
from .xargs import facts_in

log = logging.getLogger("vllm.block_export")

UNKNOWN_HITS = -1
BLOCKED = ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",)


class FollowedRequests:
    """A scheduler's requests as the arrays that a batching rule works on.

    Requests that the rule does not know (streaming sessions) have no slot.
    """

    def __init__(self, scheduler: Any, config: EngineConfig, step_time: StepTime, *, origin_s: float) -> None:
        """Start with an idle engine, whose time starts at `origin_s`."""
        self.num_bad_facts = 0
        self.last_end_s = -math.inf  # when the last step ended
        self.caches = bool(config.enable_prefix_caching)
        self.blocks_of = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        self.looked_up: list[int] = []  # slots whose prefixes the last plan has looked up
        self.slots: dict[str, int] = {}
        self.requests: list[Any] = []  # by slot
        self._scheduler, self._config, self._origin_s = scheduler, config, origin_s
        self._by_priority, self._is_unsorted = config.scheduling_policy == "priority", False
        self._pool = scheduler.kv_cache_manager.block_pool
        self._free_slots: list[int] = []
        self._blocked: dict[Any, None] = {}  # requests that cannot be admitted yet, and have no place in the queue
        self._stale: dict[Any, None] = {}  # preempted requests with output in flight
        self._new: list[Any] = []
        self._serial = 0
        self._use(Engine(config, step_time, track_blocks=False).state)

    def added(self, request: Any) -> None:
        """Note a request that has arrived."""
        self._new.append(request)

    def knows(self, request: Any) -> bool:
        """Return whether the rule plans a request."""
        return getattr(request, "block_slot", NONE) != NONE

    def _knows_all(self) -> bool:
        return len(self.slots) == len(self._scheduler.requests)

    def unknown(self) -> list[Any]:
        """Return the waiting requests that the rule does not plan."""
        if self._knows_all():
            return []
        return [one for one in self._scheduler.waiting if not self.knows(one)]

    @property
    def num_known(self) -> int:
        """The number of requests that have a slot."""
        return len(self.requests) - len(self._free_slots)

    def _use(self, state: State) -> None:
        """Work with these arrays."""
        num_old, num_new = len(self.requests), len(state.requests)
        self.state = state
        self.engine, self.rows, self.facts, self.steps, self.batch = (
            one.view(np.ndarray) for one in (state.engine, state.requests, state.facts, state.steps, state.batch)
        )
        self.clients = state.clients.view(np.ndarray)
        self.requests += [None] * (num_new - num_old)
        self._free_slots[:0] = range(num_new - 1, num_old - 1, -1)

    def follow(self) -> None:
        """Bring the state up to date with the scheduler's requests."""
        scheduler, engine = self._scheduler, self.engine
        self._forget_ended(scheduler.finished_req_ids)
        for request in self._new:
            if scheduler.requests.get(request.request_id) is request and not request.is_finished():
                self._enter(request)
        self._new.clear()
        for request in [one for one in self._blocked if scheduler._handle_blocked_waiting_request(one)]:  # noqa: SLF001
            del self._blocked[request]
            self._join_waiting(request.block_slot)
        for slot in self.looked_up:
            self.rows["num_hashes"][slot] = UNKNOWN_HITS
        self.looked_up.clear()
        if scheduler.reset_preempted_req_ids or len(scheduler.waiting) != engine["num_waiting"][0] + len(self._blocked):
            self._rebuild_waiting()
        if self._by_priority and self._is_unsorted:
            self._sort_waiting()
        self._follow_stale()
        self._follow_running()
        engine["num_free_blocks"] = self._pool.get_num_free_blocks()

    def follow_unplanned(self, output: Any, now_s: float) -> None:
        """Follow a step without a plan, before which `follow` may not have run: vLLM was paused."""
        self.engine["now_s"] = now_s
        self._forget_ended(output.finished_req_ids)
        self._rebuild_waiting()

    def _follow_running(self) -> None:
        running = self._scheduler.running
        known = running if self._knows_all() else [one for one in running if self.knows(one)]
        count = len(known)
        self.engine["num_running"] = count
        if not count:
            return
        slots = _column([one.block_slot for one in known])
        self.state.running[:count] = slots
        rows = self.rows
        outputs = _column([one.num_output_tokens for one in known])
        has_first = (outputs > 0) & (rows["first_token_s"][slots] < 0)
        if has_first.any():
            rows["first_token_s"][slots[has_first]] = self.last_end_s
        rows["output_tokens"][slots] = outputs
        rows["computed_tokens"][slots] = _column([one.num_computed_tokens for one in known])
        rows["placeholders"][slots] = _column([one.num_output_placeholders for one in known])
        blocks_of = self.blocks_of
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
            self.rows["stale_tokens"][slot] = stale
            self.rows["output_tokens"][slot] = request.num_output_tokens
            if request.num_output_tokens and self.rows["first_token_s"][slot] < 0:
                self.rows["first_token_s"][slot] = self.last_end_s
            if not stale:
                del self._stale[request]

    def _enter(self, request: Any) -> None:
        """Give a new request a slot."""
        if request.resumable:
            return
        if not self._free_slots:
            self._use(widen(self.state, num_slots=len(self.requests) + 1, blocks_per_request=0, num_contents=0))
        slot = self._free_slots.pop()
        self.requests[slot], self.slots[request.request_id] = request, slot
        request.block_slot = slot
        columns = self._facts_of(request)
        max_tokens = max(1, min(int(request.max_tokens), self._config.max_model_len - request.num_prompt_tokens))
        self._serial += 1
        self.rows[slot] = new_request(
            prompt_tokens=request.num_prompt_tokens,
            final_tokens=max_tokens,
            max_tokens=max_tokens,
            priority=int(request.priority),
            tie_break=self._serial,
            arrival_s=request.arrival_time - self._origin_s,
            num_hashes=UNKNOWN_HITS if self.caches else 0,
            serial=self._serial,
            status=WAITING,
        )
        tag = columns.get("tag_tokens", math.nan)
        if 0 < tag < max_tokens:
            self.rows["expected_tokens"][slot] = round(tag)
        client = columns.get("client_id", "")
        self.facts[slot] = (
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
            slot = self.slots.get(name)
            if slot is not None and self.requests[slot].is_finished():  # and not a new request with an old name
                del self.slots[name]
                self._forget(slot)

    def _forget(self, slot: int) -> None:
        request = self.requests[slot]
        if request in self._blocked:
            del self._blocked[request]
        elif self.rows["status"][slot] == WAITING:
            self._leave_waiting(slot)
        self._stale.pop(request, None)
        request.block_slot, self.requests[slot] = NONE, None
        self._free_slots.append(slot)

    # The waiting queue, whose head is always at index 0, in vLLM's order.

    def admitted(self, request: Any) -> None:
        """Take a request that vLLM has admitted from the queue."""
        self._leave_waiting(request.block_slot)
        self.rows["status"][request.block_slot] = RUNNING

    def _join_waiting(self, slot: int) -> None:
        count = int(self.engine["num_waiting"][0])
        self.state.waiting[count] = slot
        self.engine["num_waiting"] = count + 1
        self._is_unsorted = True

    def _leave_waiting(self, slot: int) -> None:
        count = int(self.engine["num_waiting"][0])
        waiting = self.state.waiting
        (places,) = np.nonzero(waiting[:count] == slot)
        if len(places):
            waiting[places[0] : count - 1] = waiting[places[0] + 1 : count]
            self.engine["num_waiting"] = count - 1

    def preempted(self, request: Any) -> None:
        """Put a request that vLLM has preempted first in the queue."""
        slot = request.block_slot
        count = int(self.engine["num_waiting"][0])
        self.state.waiting[1 : count + 1] = self.state.waiting[:count].copy()
        self.state.waiting[0] = slot
        self.engine["num_waiting"] = count + 1
        self._is_unsorted = True
        self._wait_again(request)

    def _sort_waiting(self) -> None:
        count = int(self.engine["num_waiting"][0])
        slots = self.state.waiting[:count]
        rows = self.rows[slots]
        slots[:] = slots[np.lexsort((rows["tie_break"], rows["arrival_s"], rows["priority"]))]
        self._is_unsorted = False

    def _wait_again(self, request: Any) -> None:
        rows, slot = self.rows, request.block_slot
        rows["status"][slot] = WAITING
        rows["computed_tokens"][slot] = rows["placeholders"][slot] = rows["num_blocks"][slot] = 0
        rows["full_blocks"][slot] = 0
        rows["num_hashes"][slot] = UNKNOWN_HITS if self.caches else 0
        rows["num_preemptions"][slot] = request.num_preemptions
        self._stale[request] = None

    def _rebuild_waiting(self) -> None:
        """Read both queues again, after vLLM has changed them without a plan."""
        for request in self._scheduler.running:
            if self.knows(request):
                self.rows["status"][request.block_slot] = RUNNING
        waiting = [one for one in self._scheduler.waiting if self.knows(one) and one not in self._blocked]
        for request in waiting:
            if self.rows["status"][request.block_slot] == RUNNING:
                self._wait_again(request)
        self.state.waiting[: len(waiting)] = [one.block_slot for one in waiting]
        self.engine["num_waiting"] = len(waiting)


def _column(values: list[int]) -> np.ndarray:
    return np.frombuffer(array("i", values), np.int32)
