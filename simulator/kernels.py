"""Compiled code that advances all engines of a simulated cluster and writes their indicators, in one call.

The engines are the layers of one stacked state; within a layer the engine model's own kernels run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from predictor import blocks, load, loop, queues
from predictor.compiled import direct, kernel, small_kernel
from predictor.engine import ANY_NUMBER
from predictor.state import (
    DECODE_LEG,
    FINISHED,
    HALF_CREDIT,
    HELD,
    NO_TRANSFER,
    NONE,
    PENDING,
    PREFILL_LEG,
    TO_FETCH,
    State,
)
from predictor.step_time import Costs

CANDIDATE = 0  # the slot that is reserved for the request of a forecast

REQUEST = np.dtype(
    [
        ("prompt_tokens", "i8"),
        ("output_tokens", "i8"),  # the true response length
        ("max_tokens", "i8"),
        ("priority", "i8"),
        ("first_content", "i8"),
        ("num_contents", "i8"),
        ("arrival_s", "f8"),
        ("log_median", "f8"),  # of the tag; NaN if the true length is known
        ("spread", "f8"),
        ("ttft_slo_s", "f8"),  # NaN: no target
        ("tpot_slo_s", "f8"),
        ("weight", "f8"),
        ("request_class", "i8"),
        ("adapter", "i8"),  # `predictor.request.adapter_number`; 0: none
    ],
    align=True,
)

OUTCOME = np.dtype(
    [
        ("scheduled_s", "f8"),
        ("first_token_s", "f8"),
        ("finished_s", "f8"),
        ("num_preemptions", "i8"),
        ("hit_tokens", "i8"),
        ("produced_tokens", "i8"),
        ("tokens_on_time", "i8"),  # NONE where no token has a deadline
    ],
    align=True,
)

# The two legs of a request, where it has two.
LEGS_OF_REQUEST = np.dtype(
    [
        ("prefill", "i8"),  # instances and slots; NONE
        ("prefill_slot", "i8"),
        ("decode", "i8"),
        ("decode_slot", "i8"),
        ("scheduled_s", "f8"),  # of the prefill leg
        ("prefilled_s", "f8"),  # when it ended
        ("fetched_s", "f8"),
        ("hit_tokens", "i8"),  # of the prefill leg
    ],
    align=True,
)

SLOT = np.dtype(
    [
        ("number", "i8"),
        ("visible_s", "f8"),
        ("log_median", "f8"),
        ("spread", "f8"),
        ("is_awaited", "i8"),  # a decode leg that has not arrived
        ("due_s", "f8"),  # when it is predicted to arrive; of a prefill leg, for how long its blocks will be held
    ],
    align=True,
)

INSTANCE = np.dtype(
    [
        ("up", "i8"),
        ("changed", "i8"),  # since its indicators were last written
        ("num_free_slots", "i8"),
        ("num_finished", "i8"),
        ("pace", "f8"),  # real over profiled step time, without noise
        ("predicted_pace", "f8"),
        ("hit_share", "f8"),  # share of prompt tokens found cached, averaged over the last finished requests
        ("first_noise", "i8"),
        ("deterministic", "i8"),  # its forecasts are exact until another request joins
        ("role", "i8"),  # index in `scheduler.instances.ROLES`
        ("num_underway", "i8"),
        ("lease_s", "f8"),  # for how long the blocks of a prefill leg are held if nothing else is known
        ("has_lookahead", "i8"),  # the workspace holds a state of it that runs ahead: see forecast_kernels.py
    ],
    align=True,
)

# The indicators that `refresh` writes, in the order of its argument `rows`.
INDICATORS = (
    "num_running", "num_waiting", "num_reserved", "num_total_blocks", "num_free_blocks", "num_reserved_blocks",
    "num_waiting_blocks", "queued_prefill_tokens", "context_tokens", "remaining_tokens", "kv_hit_ratio", "pace",
    "step_s", "num_preemptions_total", "num_finished_total", "num_fetching", "num_held_blocks", *load.LOAD,
)  # fmt: skip

SENT, FULL = 0, 1  # what `send` returns
HIT_SHARE_DECAY = 0.98


class EngineArrays(NamedTuple):
    """The engines of a cluster, one per index of each array's first axis."""

    stack: State
    predicted_costs: Costs  # step times that forecasts use
    instances: np.recarray[Any, Any]
    slots: np.recarray[Any, Any]
    free_slots: np.ndarray
    underway: np.ndarray  # slots of legs that concern another engine, in any order: see coupled.py
    noise: np.ndarray  # factors of successive step times; a single 1 without noise
    residual: np.ndarray  # the table of `predicted_tokens`; empty for the rule `plus_ten`


class Requests(NamedTuple):
    """All requests of a run and their outcomes, indexed by number; `contents` joins the blocks of all prompts."""

    facts: np.recarray[Any, Any]
    contents: np.ndarray
    outcomes: np.recarray[Any, Any]
    legs: np.recarray[Any, Any]


RESIDUAL_LOW, RESIDUAL_HIGH = -8.0, 8.0


@small_kernel
def predicted_tokens(log_median: float, spread: float, produced: int, residual: np.ndarray) -> int:
    """Predict a response's total length as `predictor.lengths` does, from a table over standard scores."""
    if spread <= 0.0 or produced == 0 or len(residual) == 0:
        median = np.exp(log_median)
        whole = median if median > produced else produced + 10.0
    else:
        score = (np.log(produced) - log_median) / spread
        if score <= RESIDUAL_LOW:
            shifted = residual[0]
        elif score >= RESIDUAL_HIGH:
            shifted = score + (residual[-1] - RESIDUAL_HIGH) * RESIDUAL_HIGH / score
        else:
            position = (score - RESIDUAL_LOW) / (RESIDUAL_HIGH - RESIDUAL_LOW) * (len(residual) - 1)
            below = int(position)
            shifted = residual[below] + (position - below) * (residual[below + 1] - residual[below])
        whole = np.exp(log_median + spread * shifted)
    return max(produced + 1, int(min(2147483647.0, np.ceil(whole - 0.5))))


@small_kernel
def engine_at(stack: State, costs: Costs, index: int) -> State:
    """Give one engine of the stack, with its real or its predicted step times."""
    return State(
        stack.engine[index], stack.requests[index], stack.running[index], stack.waiting[index], stack.pending[index],
        stack.transfers[index], stack.preempted[index], stack.steps[index], stack.batch[index],
        stack.turn_starts[index], stack.turns[index], stack.ranks[index], stack.clients[index],
        stack.two_ended_blocks[index], stack.blocks[index], stack.tables[index], stack.cached[index],
        stack.adapters[index], stack.step_adapters[index], stack.encoder_cache[index], stack.encoder_inputs[index],
        stack.facts[index], stack.hashes[index], stack.expected_accepted[index],
        Costs(costs.coefficients[index], costs.by_tokens[index], costs.by_count[index]),
    )  # fmt: skip


@kernel
def advance_one(fleet: EngineArrays, index: int, until_s: float) -> None:
    """Run one engine until a time; with noise, step by step."""
    any_number, unwatched = np.int64(ANY_NUMBER), np.int64(NONE)
    state = engine_at(fleet.stack, fleet.stack.costs, index)
    engine, instance = state.engine[0], fleet.instances[index]
    size = len(fleet.noise)
    engine.pace = instance.pace
    if size == 1:
        loop.drive(state, until_s, any_number, unwatched)
        return
    before = np.int64(-1)
    while engine.num_steps != before:
        before = engine.num_steps
        engine.pace = instance.pace * fleet.noise[(instance.first_noise + before) % size]
        loop.drive(state, until_s, before + 1, unwatched)


@small_kernel
def is_quiet(fleet: EngineArrays, index: int, until_s: float) -> bool:
    """Return True if an engine certainly does nothing until a time; a cheap check that may miss some."""
    engine = fleet.stack.engine[index, 0]
    if engine.num_in_flight == engine.pipeline_depth:
        return fleet.stack.steps[index, engine.oldest].end_s > until_s
    if engine.num_in_flight + engine.num_running + engine.num_waiting > 0:
        return False
    pending = fleet.stack.pending[index, engine.pending_head]
    if engine.next_transfer_s <= until_s:
        return False
    return engine.num_pending == 0 or fleet.stack.requests[index, pending].arrival_s > until_s


@kernel
def advance(fleet: EngineArrays, until_s: float) -> None:
    """Run all engines until a time."""
    for index in range(len(fleet.instances)):
        instance = fleet.instances[index]
        if instance.up and not is_quiet(fleet, index, until_s):
            advance_one(fleet, index, until_s)
            instance.changed = 1


@kernel
def fill_slot(fleet: EngineArrays, requests: Requests, index: int, slot: int, number: int, arrives_s: float) -> None:
    """Write a request into a slot, as not yet arrived."""
    facts = requests.facts[number]
    engine, request = fleet.stack.engine[index, 0], fleet.stack.requests[index, slot]
    max_tokens = min(facts.max_tokens, engine.max_model_len - facts.prompt_tokens)
    request.status = PENDING
    request.prompt_tokens = facts.prompt_tokens
    request.output_tokens = request.computed_tokens = request.placeholders = 0
    request.in_flight_tokens = request.stale_tokens = 0
    request.final_tokens = request.expected_tokens = min(facts.output_tokens, max_tokens)
    if not np.isnan(facts.log_median):
        predicted = predicted_tokens(facts.log_median, facts.spread, 0, fleet.residual)
        request.expected_tokens = min(predicted, max_tokens)
    request.max_tokens = max_tokens
    request.num_blocks = request.full_blocks = request.num_hashes = 0
    request.scheduled_s = request.first_token_s = request.finished_s = float(NONE)
    request.arrival_s = arrives_s
    request.serial = request.tie_break = number
    request.priority = facts.priority
    request.num_preemptions = request.hit_tokens = request.prefill_tokens = 0
    request.leg = request.stage = request.draft_tokens = 0
    request.transfer_s = 0.0
    request.acceptance_credit = request.proposal_credit = HALF_CREDIT
    target = fleet.stack.facts[index, slot]
    # deadlines count from the arrival at the cluster
    target.ttft_slo_s = facts.ttft_slo_s - (arrives_s - facts.arrival_s)
    target.tpot_slo_s, target.weight, target.request_class = facts.tpot_slo_s, facts.weight, facts.request_class
    target.adapter = facts.adapter
    request.tokens_on_time = NONE if np.isnan(facts.ttft_slo_s) else 0
    if engine.prefix_caching:
        num_hashes = min(facts.num_contents, facts.prompt_tokens // engine.block_size)
        request.num_hashes = num_hashes
        for position in range(num_hashes):
            fleet.stack.hashes[index, slot, position] = requests.contents[facts.first_content + position]


@small_kernel
def as_prefill_leg(request: np.record, held_s: float) -> None:
    """Make a request that is in a slot its prefill leg."""
    request.leg, request.transfer_s = PREFILL_LEG, held_s
    request.final_tokens = request.expected_tokens = request.max_tokens = 1


@small_kernel
def as_decode_leg(request: np.record) -> None:
    """Make a request that is in a slot its decode leg, whose transfer takes as long as the engine says."""
    request.leg, request.stage, request.transfer_s = DECODE_LEG, TO_FETCH, np.nan


@kernel
def collect_finished(fleet: EngineArrays, requests: Requests, index: int) -> None:
    """Record the outcomes of the requests that an engine has finished, and free their slots."""
    instance = fleet.instances[index]
    for slot in range(1, fleet.slots.shape[1]):
        entry = fleet.slots[index, slot]
        request = fleet.stack.requests[index, slot]
        if entry.number < 0 or request.status != FINISHED or request.in_flight_tokens > 0:
            continue
        if request.stage != NO_TRANSFER:
            continue  # its blocks are held
        if request.leg != PREFILL_LEG:
            write_outcome(requests.outcomes[entry.number], request)
        share = (1.0 - HIT_SHARE_DECAY) * request.hit_tokens / request.prompt_tokens
        instance.hit_share = HIT_SHARE_DECAY * instance.hit_share + share
        instance.num_finished += 1
        fleet.free_slots[index, instance.num_free_slots] = slot
        instance.num_free_slots += 1
        entry.number = NONE


@small_kernel
def write_outcome(outcome: np.record, request: np.record) -> None:
    """Copy a finished request's outcome."""
    outcome.scheduled_s = request.scheduled_s
    outcome.first_token_s = request.first_token_s
    outcome.finished_s = request.finished_s
    outcome.num_preemptions += request.num_preemptions
    outcome.hit_tokens = request.hit_tokens
    outcome.produced_tokens = request.output_tokens
    outcome.tokens_on_time = request.tokens_on_time


@kernel
def send(fleet: EngineArrays, requests: Requests, number: int, index: int, arrives_s: float, visible_s: float) -> int:
    """Send a request to an engine, whose indicators count it from `visible_s` on; return FULL if no slot is free."""
    slot = take_slot(fleet, requests, index, number, visible_s)
    if slot == NONE:
        return FULL
    fill_slot(fleet, requests, index, slot, number, arrives_s)
    queues.announce(engine_at(fleet.stack, fleet.stack.costs, index), slot)
    return SENT


@kernel
def take_slot(fleet: EngineArrays, requests: Requests, index: int, number: int, visible_s: float) -> int:
    """Take a free slot of an engine for a request; return NONE if no slot is free."""
    instance = fleet.instances[index]
    if instance.num_free_slots == 0:
        collect_finished(fleet, requests, index)
        if instance.num_free_slots == 0:
            return NONE
    instance.num_free_slots -= 1
    instance.changed = 1
    slot = fleet.free_slots[index, instance.num_free_slots]
    entry = fleet.slots[index, slot]
    entry.number = number
    entry.visible_s = visible_s
    entry.log_median = requests.facts[number].log_median
    entry.spread = requests.facts[number].spread
    entry.is_awaited = 0
    return int(slot)


@kernel
def refresh(
    fleet: EngineArrays, requests: Requests, number: int, index: int, arrives_s: float, visible_s: float, now_s: float,
    rows: np.ndarray, indicators: np.ndarray,
) -> int:  # fmt: skip
    """Send request `number` unless it is negative, run all engines until now, and write the indicators that changed."""
    if number >= 0 and send(fleet, requests, number, index, arrives_s, visible_s) == FULL:
        return FULL
    advance(fleet, now_s)
    for at in range(len(fleet.instances)):
        instance = fleet.instances[at]
        if instance.changed or fleet.stack.engine[at, 0].num_pending > 0:
            instance.changed = 0
            write_indicators(fleet, at, now_s, rows, indicators[:, at])
    return SENT


@kernel
def write_indicators(  # noqa: PLR0915 - one loop writes them all
    fleet: EngineArrays, index: int, now_s: float, rows: np.ndarray, indicators: np.ndarray
) -> None:
    """Write an engine's indicators as its sidecar computes them (predictor/indicators.py)."""
    engine, instance = fleet.stack.engine[index, 0], fleet.instances[index]
    requests, slots = fleet.stack.requests[index], fleet.slots[index]
    queued_tokens = context = remaining = 0
    state, times = engine_at(fleet.stack, fleet.predicted_costs, index), load.NONE_YET
    for position in range(engine.num_running):
        slot = fleet.stack.running[index, position]
        request = requests[slot]
        times = load.added(state, slot, times)
        context += request.computed_tokens
        queued_tokens += max(0, request.prefill_tokens - request.computed_tokens)
        remaining += remaining_tokens_of(fleet, request, slots[slot])
    waiting, waiting_blocks = engine.num_waiting, 0
    reserved, reserved_blocks, awaited_tokens = count_awaited(fleet, index, now_s)
    remaining += awaited_tokens
    for position in range(engine.num_waiting):
        slot = fleet.stack.waiting[index, queues.at(engine.waiting_head, position, fleet.slots.shape[1])]
        request = requests[slot]
        tokens = request.prompt_tokens + request.output_tokens
        times = load.added(state, slot, times)
        queued_tokens += tokens - request.computed_tokens if request.stage == NO_TRANSFER else 0
        waiting_blocks += blocks.blocks_for(tokens, engine.block_size) - request.num_blocks
        remaining += remaining_tokens_of(fleet, request, slots[slot])
    for position in range(engine.num_pending):
        slot = fleet.stack.pending[index, queues.at(engine.pending_head, position, fleet.slots.shape[1])]
        request = requests[slot]
        if slots[slot].visible_s > now_s:
            continue
        times = load.added(state, slot, times)
        queued_tokens += request.prompt_tokens if request.stage == NO_TRANSFER else 0
        remaining += remaining_tokens_of(fleet, request, slots[slot])
        needed = blocks.blocks_for(np.int64(request.prompt_tokens), engine.block_size)
        if request.arrival_s > now_s:
            reserved += 1
            reserved_blocks += needed
        else:
            waiting += 1
            waiting_blocks += needed
    indicators[rows[0]] = engine.num_running
    indicators[rows[1]] = waiting
    indicators[rows[2]] = reserved
    indicators[rows[3]] = engine.num_blocks
    indicators[rows[4]] = engine.num_free_blocks
    indicators[rows[5]] = reserved_blocks
    indicators[rows[6]] = waiting_blocks
    indicators[rows[7]] = queued_tokens
    indicators[rows[8]] = context
    indicators[rows[9]] = remaining
    indicators[rows[10]] = instance.hit_share
    indicators[rows[11]] = instance.pace
    indicators[rows[12]] = step_in_flight_s(fleet, index)
    indicators[rows[13]] = engine.num_preemptions
    indicators[rows[14]] = instance.num_finished
    indicators[rows[15]] = engine.num_fetching
    indicators[rows[16]] = count_held_blocks(fleet, index)
    indicators[rows[17]], indicators[rows[18]], indicators[rows[19]] = load.shown(state, times)


@small_kernel
def step_in_flight_s(fleet: EngineArrays, index: int) -> float:
    """Return how long the oldest step in flight takes; 0 without one."""
    engine = fleet.stack.engine[index, 0]
    step = fleet.stack.steps[index, engine.oldest]
    return float(step.end_s - step.start_s) if engine.num_in_flight > 0 else 0.0


@kernel
def count_awaited(fleet: EngineArrays, index: int, now_s: float) -> tuple[int, int, int]:
    """Count the decode legs that are reserved and have not arrived, their blocks, and the tokens of their responses."""
    awaited = num_blocks = tokens = 0
    for position in range(fleet.instances[index].num_underway):
        slot = fleet.underway[index, position]
        entry, request = fleet.slots[index, slot], fleet.stack.requests[index, slot]
        if entry.is_awaited and entry.visible_s <= now_s:
            awaited += 1
            num_blocks += blocks.blocks_for(np.int64(request.prompt_tokens), fleet.stack.engine[index, 0].block_size)
            tokens += remaining_tokens_of(fleet, request, entry)
    return awaited, num_blocks, tokens


@kernel
def count_held_blocks(fleet: EngineArrays, index: int) -> int:
    """Count the blocks of finished prefill legs that have not been fetched."""
    held_blocks = 0
    for position in range(fleet.stack.engine[index, 0].num_transfers):
        request = fleet.stack.requests[index, fleet.stack.transfers[index, position]]
        held_blocks += request.num_blocks if request.stage == HELD else 0
    return held_blocks


@small_kernel
def remaining_tokens_of(fleet: EngineArrays, request: np.record, entry: np.record) -> int:
    """Predict how many tokens of a response remain."""
    if np.isnan(entry.log_median):
        return request.final_tokens - request.output_tokens
    whole = predicted_tokens(entry.log_median, entry.spread, request.output_tokens, fleet.residual)
    return min(whole, request.max_tokens) - request.output_tokens


@kernel
def count_hits(fleet: EngineArrays, requests: Requests, number: int, hit_tokens: np.ndarray) -> int:
    """Count the prompt tokens that each engine has cached; return the deepest content cached anywhere, or -1."""
    facts = requests.facts[number]
    deepest = -1
    max_hits = 0
    for index in range(len(fleet.instances)):
        engine = fleet.stack.engine[index, 0]
        num_hits = 0
        if engine.prefix_caching:
            limit = min(facts.num_contents, (facts.prompt_tokens - 1) // engine.block_size)
            while num_hits < limit:
                content = requests.contents[facts.first_content + num_hits]
                if fleet.stack.cached[index, content] == NONE:
                    break
                num_hits += 1
        hit_tokens[index] = num_hits * engine.block_size
        if num_hits > max_hits:
            max_hits = num_hits
            deepest = requests.contents[facts.first_content + num_hits - 1]
    return deepest


@kernel
def count_late(fleet: EngineArrays, requests: Requests, now_s: float, limit_s: float) -> int:
    """Count the requests whose first token was later than the limit, or is missing and already later."""
    num_late = 0
    for number in range(len(requests.outcomes)):
        late_s = requests.outcomes[number].first_token_s - requests.facts[number].arrival_s
        num_late += late_s > limit_s
    for index in range(len(fleet.instances)):
        for slot in range(1, fleet.slots.shape[1]):
            number = fleet.slots[index, slot].number
            if number >= 0:
                first_s = fleet.stack.requests[index, slot].first_token_s
                num_late += (first_s if first_s >= 0 else now_s) - requests.facts[number].arrival_s > limit_s
    return num_late


refresh_directly, count_hits_directly = direct(refresh), direct(count_hits)
