"""Kernels that bring a reported state into an engine model, and their errors."""

from __future__ import annotations

import numpy as np

from predictor import steps
from predictor.blocks import chain_same
from predictor.compiled import kernel, small_kernel
from predictor.request import CLASSES, LEGS, MAX_PRIORITY
from predictor.state import (
    EXPECTED,
    FINISHED,
    HALF_CREDIT,
    NO_CONTENT,
    NO_TRANSFER,
    NONE,
    PENDING,
    RUNNING,
    WAITING,
    State,
)

# Errors in a reported state, by the number that the kernels below return; 0 is none.
ERRORS = (
    "",
    "running: a slot is a duplicate, or does not exist",
    "live: a count is below zero",
    "prompt_tokens: do not fit the model",
    "output_tokens: are not below the request's limit",
    "computed_tokens: are more than the request has tokens",
    "num_blocks: hold too few tokens",
    "num_blocks: are more than the request can need",
    "steps: contain a request that neither runs nor waits",
    "steps: give a request no tokens",
    "scheduled: are more requests or tokens than a step of this engine can have",
    "tables: are shorter than the number of blocks held",
    "tables: name a block that does not exist",
    "blocks.reuse: does not list the blocks that no request holds",
    "drafts: are more than a step of this engine can have",
)
NUM_CLASSES, NUM_LEGS = len(CLASSES), len(LEGS)
(
    OK, BAD_SLOT, BELOW_ZERO, BAD_PROMPT, TOO_MANY_OUTPUT, TOO_MANY_COMPUTED, TOO_FEW_BLOCKS, TOO_MANY_BLOCKS,
    UNKNOWN_REQUEST, NO_TOKENS, TOO_LARGE_STEP, SHORT_TABLE, UNKNOWN_BLOCK, WRONG_REUSE, TOO_MANY_DRAFTS,
) = range(len(ERRORS))  # fmt: skip


@small_kernel
def error_in(engine: np.record, reported: np.record, fact: np.record, holds: bool, has_ended: bool) -> int:
    """Return what is wrong with one reported request, which may hold blocks, or have ended."""
    if (
        reported.output_tokens < 0 or reported.computed_tokens < 0 or reported.placeholders < 0
        or reported.in_flight_tokens < 0 or reported.stale_tokens < 0 or reported.num_blocks < 0
        or reported.full_blocks < 0 or reported.num_preemptions < 0 or reported.hit_tokens < 0
        or reported.draft_tokens < 0
    ):  # fmt: skip
        return BELOW_ZERO
    prompt = np.int64(fact.prompt_tokens)
    if prompt <= 0 or prompt >= engine.max_model_len:
        return BAD_PROMPT
    max_tokens = min(np.int64(fact.max_tokens), engine.max_model_len - prompt)
    if reported.output_tokens >= max_tokens and not has_ended:
        return TOO_MANY_OUTPUT
    # where a request computes draft tokens, they count as computed until they are rejected
    drafts = min(np.int64(reported.in_flight_tokens), engine.num_speculative_tokens)
    if reported.computed_tokens > prompt + reported.output_tokens + reported.placeholders + drafts:
        return TOO_MANY_COMPUTED
    num_blocks = np.int64(reported.num_blocks) if holds else 0
    if holds and not has_ended and num_blocks * engine.block_size < reported.computed_tokens:
        return TOO_FEW_BLOCKS
    most_tokens = prompt + max_tokens
    if engine.num_speculative_tokens > 0:
        most_tokens += engine.pipeline_depth * (1 + engine.num_speculative_tokens) + engine.num_lookahead_tokens
    if max(num_blocks, np.int64(reported.full_blocks)) * engine.block_size >= most_tokens + engine.block_size:
        return TOO_MANY_BLOCKS
    return OK


@small_kernel
def put_facts(facts: np.record, reported: np.record) -> None:
    """Copy a request's service level, weight, tenant and class; impossible values count as not given."""
    facts.ttft_slo_s = reported.ttft_slo_s if 0 < reported.ttft_slo_s < np.inf else np.nan
    facts.tpot_slo_s = reported.tpot_slo_s if 0 < reported.tpot_slo_s < np.inf else np.nan
    facts.weight = reported.weight if 0 < reported.weight < np.inf else 1.0
    facts.tenant = reported.tenant
    facts.request_class = np.int64(reported.request_class) if 0 <= reported.request_class < NUM_CLASSES else 0
    facts.adapter = reported.adapter
    facts.num_encoder_inputs = 0  # whose outputs an engine does not report: see docs/engines.md


@small_kernel
def put_tokens(engine: np.record, request: np.record, reported: np.record) -> None:
    """Copy a request's prefix hits, and the draft tokens of its next step; expectations of later ones begin again."""
    request.hit_tokens = reported.hit_tokens
    request.draft_tokens = min(np.int64(reported.draft_tokens), engine.num_speculative_tokens)
    request.acceptance_credit = request.proposal_credit = HALF_CREDIT


@kernel
def put_requests(
    state: State, slots: np.ndarray, num_running: int, num_waiting: int, num_slots: int, live: np.ndarray,
    facts: np.ndarray, lengths: np.ndarray,
) -> int:  # fmt: skip
    """Fill the slots and queues with the reported requests; the first `num_running` of them run, the next ones wait."""
    engine = state.engine[0]
    for slot in range(num_slots):
        state.requests[slot].status = PENDING
    for index in range(len(slots)):
        slot = slots[index]
        request, reported, fact = state.requests[slot], live[slot], facts[slot]
        if request.status != PENDING:
            return BAD_SLOT
        runs, has_ended = index < num_running, index >= num_running + num_waiting
        holds = runs or has_ended or engine.fetches
        error = error_in(engine, reported, fact, holds, has_ended)
        if error != OK:
            return error
        prompt = fact.prompt_tokens
        max_tokens = min(np.int64(fact.max_tokens), engine.max_model_len - prompt)
        known = np.int64(prompt) + reported.output_tokens
        request.status = RUNNING if runs else (FINISHED if has_ended else WAITING)
        request.prompt_tokens = prompt
        request.output_tokens = reported.output_tokens
        request.computed_tokens = reported.computed_tokens
        request.placeholders = reported.placeholders
        request.in_flight_tokens = reported.in_flight_tokens
        request.stale_tokens = reported.stale_tokens
        length = lengths[index]
        request.final_tokens = np.int64(length) if length < max_tokens else max_tokens
        request.max_tokens = max_tokens
        request.num_blocks = reported.num_blocks if holds else 0
        request.full_blocks = reported.full_blocks
        request.num_hashes = 0
        request.scheduled_s = reported.scheduled_s if reported.scheduled_s >= 0 else float(NONE)
        request.first_token_s = reported.first_token_s if reported.first_token_s >= 0 else float(NONE)
        request.finished_s = NONE
        request.arrival_s = fact.arrival_s if 0 <= fact.arrival_s < np.inf else 0.0
        request.serial = slot
        request.tie_break = index
        request.priority = min(MAX_PRIORITY, max(-MAX_PRIORITY, fact.priority))
        request.expected_tokens = request.final_tokens
        request.num_preemptions = reported.num_preemptions
        put_tokens(engine, request, reported)
        request.leg = fact.leg if 0 <= fact.leg < NUM_LEGS else 0
        request.stage = NO_TRANSFER
        request.transfer_s = 0.0
        put_facts(state.facts[slot], fact)
        request.tokens_on_time = tokens_on_time(request, state.facts[slot].ttft_slo_s)
        if reported.prefill_tokens >= 0:
            request.prefill_tokens = reported.prefill_tokens
        else:
            decodes = reported.computed_tokens + 1 == known + reported.placeholders
            request.prefill_tokens = 0 if decodes else known
        if runs:
            state.running[index] = slot
        elif not has_ended:
            state.waiting[index - num_running] = slot
    return OK


@small_kernel
def tokens_on_time(request: np.record, ttft_slo_s: float) -> int:
    """Return how many tokens of a reported request came by their deadlines: all, as far as is known."""
    if np.isnan(ttft_slo_s):
        return NONE
    is_first_late = request.first_token_s > request.arrival_s + ttft_slo_s
    return max(0, request.output_tokens - is_first_late)


@kernel
def put_step(
    state: State, slots: np.ndarray, tokens: np.ndarray, sampled: np.ndarray, drafts: np.ndarray, start_s: float
) -> int:
    """Put a reported step in flight, behind the one that may be there already."""
    engine = state.engine[0]
    index = steps.current(state)
    step = state.steps[index]
    num_tokens = 0
    if len(slots) > engine.max_num_seqs:
        return TOO_LARGE_STEP
    for position in range(len(slots)):
        if not 0 <= slots[position] < len(state.requests) or state.requests[slots[position]].status == PENDING:
            return UNKNOWN_REQUEST
        if not 0 < tokens[position] < len(state.costs.by_tokens):
            return NO_TOKENS if tokens[position] <= 0 else TOO_LARGE_STEP
        if not 0 <= drafts[position] < min(tokens[position], state.engine[0].num_speculative_tokens + 1):
            return TOO_MANY_DRAFTS
        num_tokens += tokens[position]
    if num_tokens >= len(state.costs.by_tokens):
        return TOO_LARGE_STEP
    steps.begin(state)
    steps.clear_sums(step)
    for position in range(len(slots)):
        request, entry = state.requests[slots[position]], state.batch[index, position]
        entry.slot, entry.tokens, entry.sampled = slots[position], tokens[position], 1 if sampled[position] else 0
        entry.drafts, entry.accepted, entry.proposed = drafts[position], EXPECTED, EXPECTED
        # tokens in flight that are in no older step were scheduled by this one
        older = request.in_flight_tokens
        if engine.num_in_flight > 0:
            for other in range(state.steps[engine.oldest].num_scheduled):
                if state.batch[engine.oldest, other].slot == slots[position]:
                    older = tokens[position]
        steps.add_to_sums(step, entry, max(0, request.computed_tokens - older))
    step.num_scheduled = len(slots)
    steps.put_in_flight(state, start_s)
    return OK


@kernel
def put_blocks(
    state: State, slots: np.ndarray, lengths: np.ndarray, num_hashes: np.ndarray, order: np.ndarray,
    numbers: np.ndarray,
) -> int:  # fmt: skip
    """Set which requests hold blocks (by their tables), the order of the free ones, and the contents of all."""
    for content in range(len(state.cached)):
        state.cached[content] = NONE
    for index in range(len(state.blocks)):
        block = state.blocks[index]
        block.num_refs = 0
        block.content = block.next_same = NO_CONTENT
        if numbers[index] != NO_CONTENT:
            block.content = numbers[index]
            chain_same(state, index, numbers[index])
    num_held = 0
    for row in range(len(slots)):
        request = state.requests[slots[row]]
        request.num_hashes = num_hashes[row]
        if lengths[row] < max(request.num_blocks, request.full_blocks):
            return SHORT_TABLE
        for position in range(lengths[row]):
            index = state.tables[slots[row], position]
            if not 0 <= index < len(state.blocks):
                return UNKNOWN_BLOCK
            if position < request.num_blocks:
                num_held += state.blocks[index].num_refs == 0
                state.blocks[index].num_refs += 1
    num_known = num_held + len(order)
    # an engine that fetches can hold blocks of requests that have ended until its step ends
    if num_known > len(state.blocks) or (num_known < len(state.blocks) and not state.engine[0].fetches):
        return WRONG_REUSE
    return chain_free(state, order)


@kernel
def chain_free(state: State, order: np.ndarray) -> int:
    """Set the free blocks, in the order of reuse."""
    previous = NONE
    for index in order:
        block = state.blocks[index]
        if block.num_refs > 0:
            return WRONG_REUSE
        block.previous_free, block.next_free = previous, NONE
        if previous != NONE:
            state.blocks[previous].next_free = index
        previous = index
    engine = state.engine[0]
    engine.free_head = order[0] if len(order) > 0 else NONE
    engine.free_tail = previous
    return OK


def require_ok(error: int) -> None:
    """Raise ValueError for the number of an error."""
    if error != OK:
        raise ValueError(ERRORS[error])
