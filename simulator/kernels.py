"""A cluster's engines in compiled code: all advance and tell of themselves in one call.

The engines are layers of one stack of states; what happens within a layer is the engine model's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from predictor import blocks, loop, queues
from predictor.compiled import direct, kernel, small_kernel
from predictor.engine import ANY_NUMBER
from predictor.state import FINISHED, NOBODY, UNBORN, State
from predictor.step_time import Costs

CANDIDATE = 0  # the slot that is kept free for a request that is foretold

REQUEST = np.dtype(
    [
        ("prompt_tokens", "i8"),
        ("output_tokens", "i8"),  # the true length of the answer
        ("max_tokens", "i8"),
        ("priority", "i8"),
        ("first_content", "i8"),
        ("num_contents", "i8"),
        ("arrival_s", "f8"),
        ("log_median", "f8"),  # of its tag; NaN where the true length is known
        ("spread", "f8"),
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
    ],
    align=True,
)

SLOT = np.dtype([("number", "i8"), ("shown_s", "f8"), ("log_median", "f8"), ("spread", "f8")], align=True)

UNIT = np.dtype(
    [
        ("up", "i8"),
        ("changed", "i8"),  # since it was last looked at
        ("num_free_slots", "i8"),
        ("num_finished", "i8"),
        ("pace", "f8"),  # real over profiled step time, noise apart
        ("foreseen_pace", "f8"),
        ("hit_share", "f8"),  # of prompt tokens, by the last that ended
        ("first_noise", "i8"),
        ("certain", "i8"),  # it will do exactly what is foreseen
        ("is_ahead", "i8"),  # what is foreseen has been kept: see foretelling.py
    ],
    align=True,
)

# What `look` tells, in the order of the rows it is given.
TELLS = (
    "num_running", "num_waiting", "num_reserved", "num_total_blocks", "num_free_blocks", "num_reserved_blocks",
    "num_waiting_blocks", "queued_prefill_tokens", "context_tokens", "remaining_tokens", "kv_hit_ratio", "pace",
    "step_s", "num_preemptions_total", "num_finished_total",
)  # fmt: skip

FINE, FULL = 0, 1
HIT_MEMORY = 0.98


class EngineArrays(NamedTuple):
    """All engines: the first axis of each array counts them."""

    stack: State
    foreseen: Costs  # what forecasts reckon with
    units: np.recarray[Any, Any]
    slots: np.recarray[Any, Any]
    free_slots: np.ndarray
    noise: np.ndarray  # factors of step times, one after the other; a single one where there is no noise
    residual: np.ndarray  # the table of `expected_tokens`, empty for *plus ten*


class Requests(NamedTuple):
    """All requests of a run and what became of them, by number; contents are of all prompts, one after another."""

    asked: np.recarray[Any, Any]
    contents: np.ndarray
    outcomes: np.recarray[Any, Any]


RESIDUAL_LOW, RESIDUAL_HIGH = -8.0, 8.0


@small_kernel
def expected_tokens(log_median: float, spread: float, so_far: int, residual: np.ndarray) -> int:
    """Expect an answer's whole length as `predictor.lengths` does, from a table over standard scores."""
    if spread <= 0.0 or so_far == 0 or len(residual) == 0:
        median = np.exp(log_median)
        expected = median if median > so_far else so_far + 10.0
    else:
        score = (np.log(so_far) - log_median) / spread
        if score <= RESIDUAL_LOW:
            shifted = residual[0]
        elif score >= RESIDUAL_HIGH:
            shifted = score + (residual[-1] - RESIDUAL_HIGH) * RESIDUAL_HIGH / score
        else:
            place = (score - RESIDUAL_LOW) / (RESIDUAL_HIGH - RESIDUAL_LOW) * (len(residual) - 1)
            below = int(place)
            shifted = residual[below] + (place - below) * (residual[below + 1] - residual[below])
        expected = np.exp(log_median + spread * shifted)
    return max(so_far + 1, int(min(2147483647.0, np.ceil(expected - 0.5))))


@small_kernel
def engine_at(stack: State, costs: Costs, index: int) -> State:
    """One engine of the stack, with its own step times or those that are foreseen."""
    return State(
        stack.engine[index], stack.requests[index], stack.running[index], stack.waiting[index], stack.pending[index],
        stack.preempted[index], stack.steps[index], stack.batch[index], stack.turn_starts[index], stack.turns[index],
        stack.blocks[index], stack.tables[index], stack.cached[index], stack.facts[index], stack.hashes[index],
        Costs(costs.coefficients[index], costs.by_tokens[index], costs.by_count[index]),
    )  # fmt: skip


@kernel
def advance_one(fleet: EngineArrays, index: int, until_s: float) -> None:
    """Let everything happen on one engine that happens by then; with noise, step by step."""
    any_number, nobody = np.int64(ANY_NUMBER), np.int64(NOBODY)
    state = engine_at(fleet.stack, fleet.stack.costs, index)
    engine, unit = state.engine[0], fleet.units[index]
    size = len(fleet.noise)
    engine.pace = unit.pace
    if size == 1:
        loop.drive(state, until_s, any_number, nobody)
        return
    before = np.int64(-1)
    while engine.num_steps != before:
        before = engine.num_steps
        engine.pace = unit.pace * fleet.noise[(unit.first_noise + before) % size]
        loop.drive(state, until_s, before + 1, nobody)


@small_kernel
def is_quiet(fleet: EngineArrays, index: int, until_s: float) -> bool:
    """Tell whether nothing happens on an engine by then, at a glance; False where it takes more than that."""
    engine = fleet.stack.engine[index, 0]
    if engine.num_in_flight == engine.pipeline_depth:
        return fleet.stack.steps[index, engine.oldest].end_s > until_s
    if engine.num_in_flight + engine.num_running + engine.num_waiting > 0:
        return False
    pending = fleet.stack.pending[index, engine.pending_head]
    return engine.num_pending == 0 or fleet.stack.requests[index, pending].arrival_s > until_s


@kernel
def advance(fleet: EngineArrays, until_s: float) -> None:
    """Let everything happen that happens by then."""
    for index in range(len(fleet.units)):
        unit = fleet.units[index]
        if unit.up and not is_quiet(fleet, index, until_s):
            advance_one(fleet, index, until_s)
            unit.changed = 1


@kernel
def fill_slot(fleet: EngineArrays, requests: Requests, index: int, slot: int, number: int, arrives_s: float) -> None:
    """Write a request into a slot, as one that has not arrived."""
    asked = requests.asked[number]
    engine, request = fleet.stack.engine[index, 0], fleet.stack.requests[index, slot]
    most = min(asked.max_tokens, engine.max_model_len - asked.prompt_tokens)
    request.status = UNBORN
    request.prompt_tokens = asked.prompt_tokens
    request.output_tokens = request.computed_tokens = request.placeholders = 0
    request.in_flight_tokens = request.stale_tokens = 0
    request.final_tokens = request.expected_tokens = min(asked.output_tokens, most)
    request.max_tokens = most
    request.num_blocks = request.full_blocks = request.num_hashes = 0
    request.scheduled_s = request.first_token_s = request.finished_s = float(NOBODY)
    request.arrival_s = arrives_s
    request.serial = request.tie_break = number
    request.priority = asked.priority
    request.num_preemptions = request.hit_tokens = request.prefill_tokens = 0
    if engine.prefix_caching:
        known = min(asked.num_contents, asked.prompt_tokens // engine.block_size)
        request.num_hashes = known
        for position in range(known):
            fleet.stack.hashes[index, slot, position] = requests.contents[asked.first_content + position]


@kernel
def harvest(fleet: EngineArrays, requests: Requests, index: int) -> None:
    """Note what became of the requests that have ended on an engine, and free their slots."""
    unit = fleet.units[index]
    for slot in range(1, fleet.slots.shape[1]):
        entry = fleet.slots[index, slot]
        request = fleet.stack.requests[index, slot]
        if entry.number < 0 or request.status != FINISHED or request.in_flight_tokens > 0:
            continue
        note_outcome(requests.outcomes[entry.number], request)
        unit.hit_share = HIT_MEMORY * unit.hit_share + (1.0 - HIT_MEMORY) * request.hit_tokens / request.prompt_tokens
        unit.num_finished += 1
        fleet.free_slots[index, unit.num_free_slots] = slot
        unit.num_free_slots += 1
        entry.number = NOBODY


@small_kernel
def note_outcome(outcome: np.record, request: np.record) -> None:
    """Copy what a request has experienced."""
    outcome.scheduled_s = request.scheduled_s
    outcome.first_token_s = request.first_token_s
    outcome.finished_s = request.finished_s
    outcome.num_preemptions += request.num_preemptions
    outcome.hit_tokens = request.hit_tokens
    outcome.produced_tokens = request.output_tokens


@kernel
def send(fleet: EngineArrays, requests: Requests, number: int, index: int, arrives_s: float, shown_s: float) -> int:
    """Put a request on its way to an engine, known of from `shown_s` on; FULL where there is no slot for it."""
    unit = fleet.units[index]
    if unit.num_free_slots == 0:
        harvest(fleet, requests, index)
        if unit.num_free_slots == 0:
            return FULL
    unit.num_free_slots -= 1
    slot = fleet.free_slots[index, unit.num_free_slots]
    entry = fleet.slots[index, slot]
    entry.number = number
    entry.shown_s = shown_s
    entry.log_median = requests.asked[number].log_median
    entry.spread = requests.asked[number].spread
    fill_slot(fleet, requests, index, slot, number, arrives_s)
    queues.announce(engine_at(fleet.stack, fleet.stack.costs, index), slot)
    unit.changed = 1
    return FINE


@kernel
def look(
    fleet: EngineArrays, requests: Requests, number: int, index: int, arrives_s: float, shown_s: float, now_s: float,
    rows: np.ndarray, told: np.ndarray,
) -> int:  # fmt: skip
    """Send a request where there is one, advance to now, and tell what has changed, a column of `told` for each."""
    if number >= 0 and send(fleet, requests, number, index, arrives_s, shown_s) == FULL:
        return FULL
    advance(fleet, now_s)
    for place in range(len(fleet.units)):
        unit = fleet.units[place]
        if unit.changed or fleet.stack.engine[place, 0].num_pending > 0:
            unit.changed = 0
            tell(fleet, place, now_s, rows, told[:, place])
    return FINE


@kernel
def tell(fleet: EngineArrays, index: int, now_s: float, rows: np.ndarray, told: np.ndarray) -> None:
    """Sum an engine up, as its sidecar would: services/predictor_server/indicators.py."""
    engine, unit = fleet.stack.engine[index, 0], fleet.units[index]
    requests, slots = fleet.stack.requests[index], fleet.slots[index]
    queued_tokens = context = remaining = 0
    for place in range(engine.num_running):
        slot = fleet.stack.running[index, place]
        request = requests[slot]
        context += request.computed_tokens
        queued_tokens += max(0, request.prefill_tokens - request.computed_tokens)
        remaining += left(fleet, request, slots[slot])
    waiting, waiting_blocks, reserved, reserved_blocks = engine.num_waiting, 0, 0, 0
    for place in range(engine.num_waiting):
        slot = fleet.stack.waiting[index, queues.at(engine.waiting_head, place, fleet.slots.shape[1])]
        request = requests[slot]
        tokens = request.prompt_tokens + request.output_tokens
        queued_tokens += tokens
        waiting_blocks += blocks.blocks_for(tokens, engine.block_size)
        remaining += left(fleet, request, slots[slot])
    for place in range(engine.num_pending):
        slot = fleet.stack.pending[index, queues.at(engine.pending_head, place, fleet.slots.shape[1])]
        request = requests[slot]
        if slots[slot].shown_s > now_s:
            continue
        queued_tokens += request.prompt_tokens
        remaining += left(fleet, request, slots[slot])
        needed = blocks.blocks_for(np.int64(request.prompt_tokens), engine.block_size)
        if request.arrival_s > now_s:
            reserved += 1
            reserved_blocks += needed
        else:
            waiting += 1
            waiting_blocks += needed
    step_s = 0.0
    if engine.num_in_flight > 0:
        step = fleet.stack.steps[index, engine.oldest]
        step_s = step.end_s - step.start_s
    told[rows[0]] = engine.num_running
    told[rows[1]] = waiting
    told[rows[2]] = reserved
    told[rows[3]] = engine.num_blocks
    told[rows[4]] = engine.num_free_blocks
    told[rows[5]] = reserved_blocks
    told[rows[6]] = waiting_blocks
    told[rows[7]] = queued_tokens
    told[rows[8]] = context
    told[rows[9]] = remaining
    told[rows[10]] = unit.hit_share
    told[rows[11]] = unit.pace
    told[rows[12]] = step_s
    told[rows[13]] = engine.num_preemptions
    told[rows[14]] = unit.num_finished


@small_kernel
def left(fleet: EngineArrays, request: np.record, entry: np.record) -> int:
    """How much of an answer is thought to be left."""
    if np.isnan(entry.log_median):
        return request.final_tokens - request.output_tokens
    whole = expected_tokens(entry.log_median, entry.spread, request.output_tokens, fleet.residual)
    return min(whole, request.max_tokens) - request.output_tokens


@kernel
def count_hits(fleet: EngineArrays, requests: Requests, number: int, hit_tokens: np.ndarray) -> int:
    """Count the prompt's tokens that each engine has cached; return the last content that anybody has, or -1."""
    asked = requests.asked[number]
    deepest = -1
    most_blocks = 0
    for index in range(len(fleet.units)):
        engine = fleet.stack.engine[index, 0]
        num_hits = 0
        if engine.prefix_caching:
            most = min(asked.num_contents, (asked.prompt_tokens - 1) // engine.block_size)
            while num_hits < most:
                content = requests.contents[asked.first_content + num_hits]
                if fleet.stack.cached[index, content] == NOBODY:
                    break
                num_hits += 1
        hit_tokens[index] = num_hits * engine.block_size
        if num_hits > most_blocks:
            most_blocks = num_hits
            deepest = requests.contents[asked.first_content + num_hits - 1]
    return deepest


@kernel
def count_late(fleet: EngineArrays, requests: Requests, now_s: float, limit_s: float) -> int:
    """Count the requests that had, or will have, their first token later than the limit, as far as is certain."""
    num_late = 0
    for number in range(len(requests.outcomes)):
        late_s = requests.outcomes[number].first_token_s - requests.asked[number].arrival_s
        num_late += late_s > limit_s
    for index in range(len(fleet.units)):
        for slot in range(1, fleet.slots.shape[1]):
            number = fleet.slots[index, slot].number
            if number >= 0:
                first_s = fleet.stack.requests[index, slot].first_token_s
                num_late += (first_s if first_s >= 0 else now_s) - requests.asked[number].arrival_s > limit_s
    return num_late


look_directly, hits_directly = direct(look), direct(count_hits)
