"""Requests in the slots of simulated engines: how they are sent there, and what is recorded when they have ended."""

from __future__ import annotations

import numpy as np

from predictor import queues
from predictor.compiled import kernel, small_kernel
from predictor.state import DECODE_LEG, FINISHED, HALF_CREDIT, NO_TRANSFER, NONE, PENDING, PREFILL_LEG, TO_FETCH
from simulator.fleet_arrays import EngineArrays, Requests, engine_at
from simulator.predicted_lengths import predicted_tokens

SENT, FULL = 0, 1  # what `send` returns
HIT_SHARE_DECAY = 0.98


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
