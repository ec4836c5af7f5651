"""One engine step: the requests in it, its duration, and the effects of its end."""

from __future__ import annotations

import numpy as np

from predictor import adapters, blocks, encoder_inputs, estimator, queues
from predictor.compiled import kernel, small_kernel
from predictor.state import EXPECTED, FINISHED, PENDING, RUNNING, WAITING, State
from predictor.step_time import region_of
from predictor.tabulated_costs import is_measured, step_seconds


@small_kernel
def current(state: State) -> int:
    """Return the index of the step that is being planned: the one after those in flight."""
    return queues.at(state.engine[0].oldest, state.engine[0].num_in_flight, 2)


@small_kernel
def begin(state: State) -> None:
    """Start to plan a step: empty, for a local scheduler to fill."""
    step = state.steps[current(state)]
    step.num_scheduled = 0
    step.num_preempted = step.num_swapped = 0
    step.extra_s = 0.0


@small_kernel
def assign(state: State, slot: int, num_tokens: int) -> None:
    """Add tokens of a request to the step that is being planned."""
    assign_to(state, current(state), slot, num_tokens)


@small_kernel
def assign_to(state: State, index: int, slot: int, num_tokens: int) -> None:
    """Add tokens of a request to the step with this index, which is being planned."""
    step = state.steps[index]
    entry = state.batch[index, step.num_scheduled]
    entry.slot = slot
    entry.tokens = num_tokens
    entry.accepted = entry.proposed = EXPECTED
    step.num_scheduled += 1


@small_kernel
def pad(state: State, slot: int) -> None:
    """Fill the request that was assigned last up with draft tokens, all of which are rejected."""
    index = current(state)
    state.requests[slot].draft_tokens = state.engine[0].num_speculative_tokens
    state.batch[index, state.steps[index].num_scheduled - 1].accepted = 0


@kernel
def unassign(state: State, slot: int) -> int:
    """Remove a request from the step that is being planned; return its tokens there, 0 where it was not in it."""
    index = current(state)
    step = state.steps[index]
    for position in range(step.num_scheduled):
        if state.batch[index, position].slot == slot:
            freed = state.batch[index, position].tokens
            for moved in range(position, step.num_scheduled - 1):
                state.batch[index, moved].slot = state.batch[index, moved + 1].slot
                state.batch[index, moved].tokens = state.batch[index, moved + 1].tokens
                state.batch[index, moved].accepted = state.batch[index, moved + 1].accepted
            step.num_scheduled -= 1
            return freed
    return 0


@small_kernel
def tokens_of(state: State, slot: int) -> int:
    """Return the number of a request's tokens: prompt, output, and output that is not known yet."""
    request = state.requests[slot]
    return request.prompt_tokens + request.output_tokens + request.placeholders


@small_kernel
def launch(state: State) -> None:
    """Launch the planned step: count its tokens as computed, and set its end."""
    engine = state.engine[0]
    index = current(state)
    step = state.steps[index]
    clear_sums(step)
    if engine.max_loras > 0:
        step.extra_s += adapters.load_for_step(state)
    if engine.max_encoder_tokens > 0:
        step.extra_s += encoder_inputs.tokens_of_step(state) * engine.encoder_token_s
    now_s, has_drafts, is_ahead = engine.now_s, engine.num_speculative_tokens > 0, engine.pipeline_depth > 1
    num_decodes = context = longest = 0  # of one token each; sums in the step would be written for each request
    for position in range(step.num_scheduled):
        entry = state.batch[index, position]
        request = state.requests[entry.slot]
        before, num_tokens = request.computed_tokens, entry.tokens
        computed = before + num_tokens
        request.computed_tokens = computed
        request.in_flight_tokens += num_tokens
        if request.scheduled_s < 0:
            request.scheduled_s = now_s
        sampled = computed >= tokens_of(state, entry.slot)
        entry.sampled = sampled
        entry.drafts = 0
        if has_drafts:
            note_drafts(state, entry)
        if num_tokens == 1 and sampled and not has_drafts:
            num_decodes += 1
            context += computed
            longest = max(longest, computed)
        else:
            add_to_sums(step, entry, before)
        if sampled and is_ahead:
            request.placeholders += 1 + entry.drafts
    step.num_tokens += num_decodes
    step.num_sampled += num_decodes
    step.num_decodes += num_decodes
    step.decode_context += context
    step.decode_longest = max(step.decode_longest, longest)
    put_in_flight(state, now_s)
    engine.num_steps += 1


@small_kernel
def note_drafts(state: State, entry: np.record) -> None:
    """Note how many of a request's tokens in the planned step are draft tokens.

    Where steps are planned ahead, its next step is planned with as many as can be proposed, before they are known.
    """
    engine, request = state.engine[0], state.requests[entry.slot]
    entry.drafts = max(0, min(request.draft_tokens, request.computed_tokens - tokens_of(state, entry.slot)))
    request.draft_tokens = engine.num_speculative_tokens if entry.sampled and engine.pipeline_depth > 1 else 0


@small_kernel
def put_in_flight(state: State, start_s: float) -> None:
    """Start the planned step at `start_s`, or when the step before it ends."""
    engine = state.engine[0]
    step = state.steps[current(state)]
    step.start_s = start_s
    if engine.num_in_flight > 0:
        step.start_s = max(start_s, state.steps[engine.oldest].end_s)
    step.pace = engine.pace * engine.region_pace[region_of(step.num_tokens, step.num_decodes, step.num_prefills)]
    seconds = step.pace * step_seconds(
        state.costs, step.num_tokens, step.num_sampled, step.num_decodes, step.decode_context,
        step.num_prefills, step.prefill_qq, step.prefill_qkv, step.decode_longest,
    )  # fmt: skip
    if engine.draft_step_s > 0 and step.num_sampled > 0:
        seconds += step.pace * engine.draft_step_s
    step.end_s = step.start_s + seconds
    sequences = step.num_decodes + step.num_prefills
    if not is_measured(state.costs, step.num_tokens, sequences, step.decode_context, step.decode_longest):
        engine.unmeasured_s += seconds
    if step.num_swapped > 0:  # the copies run beside the step
        step.end_s = max(step.end_s, step.start_s + step.num_swapped * engine.swap_token_s)
    step.end_s += step.extra_s
    engine.num_in_flight += 1


@kernel
def sum_up(state: State, before: np.ndarray) -> None:
    """Sum up what the duration of the planned step depends on; `before` has each request's computed tokens."""
    index = current(state)
    step = state.steps[index]
    clear_sums(step)
    for position in range(step.num_scheduled):
        add_to_sums(step, state.batch[index, position], before[position])


@small_kernel
def clear_sums(step: np.record) -> None:
    """Reset the sums that the step's duration depends on."""
    step.num_tokens = step.num_sampled = step.num_prefills = 0
    step.num_decodes = step.decode_context = step.decode_longest = 0
    step.prefill_qq = step.prefill_qkv = 0.0


@small_kernel
def add_to_sums(step: np.record, entry: np.record, before: int) -> None:
    """Add one request's part to the sums; `before` of its tokens are computed already.

    A decode with draft tokens computes them all, but reads its context once.
    """
    step.num_tokens += entry.tokens
    step.num_sampled += entry.sampled
    if entry.tokens == 1 + entry.drafts:
        step.num_decodes += 1
        step.decode_context += before + entry.tokens
        step.decode_longest = max(step.decode_longest, before + entry.tokens)
    else:
        step.num_prefills += 1
        step.prefill_qq += float(entry.tokens) * entry.tokens
        step.prefill_qkv += float(entry.tokens) * before


@small_kernel
def retire(state: State) -> None:
    """End the oldest step in flight and process its outputs."""
    engine = state.engine[0]
    index = engine.oldest
    step = state.steps[index]
    engine.now_s = max(engine.now_s, step.end_s)
    engine.oldest = queues.at(index, 1, 2)
    if engine.estimator_momentum > 0:
        estimator.observe(engine, engine.num_steps - engine.num_in_flight, step.pace)
    engine.num_in_flight -= 1
    engine.awaits_step = 0
    if engine.defers_frees:
        free_deferred(state, index)
    proposes = engine.num_speculative_tokens > 0 and engine.pipeline_depth == 1
    num_finished = 0
    from_waiting = False
    for position in range(step.num_scheduled):
        entry = state.batch[index, position]
        request = state.requests[entry.slot]
        request.in_flight_tokens -= entry.tokens
        stale = request.stale_tokens > 0
        if stale:
            request.stale_tokens -= entry.tokens
        if request.status == FINISHED or (stale and engine.drops_stale):
            continue
        if encoder_inputs.has_some(state, entry.slot):
            encoder_inputs.release_computed(state, entry.slot)
        if not entry.sampled:
            continue
        engine.fruitless_preemptions = 0
        num_tokens = take_tokens(state, entry, stale)
        if not stale:
            know_tokens(state, entry.slot, num_tokens)
        if request.output_tokens >= request.final_tokens:
            from_waiting = from_waiting or request.status == WAITING
            queues.complete(state, entry.slot)
            num_finished += 1
        elif proposes:
            propose(state, entry)
    if num_finished > 0:
        queues.drop_finished(state, from_waiting)
    queues.forget_when_idle(state)


@small_kernel
def know_tokens(state: State, slot: int, num_tokens: int) -> None:
    """Count the tokens that a request has just got as known, and register for prefix hits the blocks known by them.

    SGLang registers a prompt at the end of its prefill, and the rest at the end of the request; vLLM does it before the
    step, where it plans none ahead.
    """
    engine, request = state.engine[0], state.requests[slot]
    if engine.pipeline_depth > 1:
        request.placeholders -= num_tokens
    if request.status != RUNNING:
        return
    if engine.is_sglang:
        if request.prompt_tokens + request.output_tokens == request.prefill_tokens + 1:
            blocks.share_full(state, slot, request.prefill_tokens)
    elif engine.pipeline_depth > 1:
        blocks.register_full(state, slot, request.computed_tokens - request.placeholders)


@small_kernel
def take_tokens(state: State, entry: np.record, stale: bool) -> int:
    """Add what a request has sampled to its output, up to its end; return the number of tokens."""
    request = state.requests[entry.slot]
    num_tokens = 1
    if entry.drafts > 0:
        num_tokens = min(1 + accept(state, entry, stale), max(1, request.final_tokens - request.output_tokens))
    for _ in range(num_tokens):
        request.output_tokens += 1
        if request.tokens_on_time >= 0:
            count_on_time(state, entry.slot)
    if request.output_tokens == num_tokens:
        request.first_token_s = state.engine[0].now_s
    return num_tokens


@small_kernel
def accept(state: State, entry: np.record, stale: bool) -> int:
    """Return how many of a request's draft tokens are accepted; the others are not computed after all.

    Where the number is not known, the expected ones of its steps add up.
    """
    request = state.requests[entry.slot]
    accepted = np.int64(entry.accepted)
    if accepted == EXPECTED:
        credit = request.acceptance_credit + state.expected_accepted[entry.drafts]
        accepted = min(np.int64(credit), np.int64(entry.drafts))
        request.acceptance_credit = credit - accepted
    if not stale:
        request.computed_tokens -= entry.drafts - accepted
        if request.placeholders > 0:
            request.placeholders -= entry.drafts - accepted
    return accepted  # type: ignore[return-value]  # numba's integers


@small_kernel
def propose(state: State, entry: np.record) -> None:
    """Set the draft tokens of a request's next step: as known, or the usual number in the usual share of steps."""
    engine, request = state.engine[0], state.requests[entry.slot]
    if entry.proposed != EXPECTED:
        request.draft_tokens = entry.proposed
        return
    credit = request.proposal_credit + engine.proposal_share
    request.draft_tokens = engine.proposed_tokens if credit >= 1 else 0
    request.proposal_credit = credit - 1 if credit >= 1 else credit


@small_kernel
def count_on_time(state: State, slot: int) -> None:
    """Count the token that a request has just got, if it came by its deadline; keep the least slack of those."""
    engine, request = state.engine[0], state.requests[slot]
    slack_s = due_s(state, slot, request.output_tokens) - engine.now_s  # NaN without a deadline
    if request.tokens_on_time == request.output_tokens - 1 and 0 <= slack_s < engine.least_slack_s:
        engine.least_slack_s = slack_s
    engine.num_setbacks += request.tokens_on_time == request.output_tokens - 1 and slack_s < 0
    if slack_s >= 0:
        request.tokens_on_time += 1


@kernel
def free_deferred(state: State, index: int) -> None:
    """Free the blocks of requests that ended while the step that ends now could still write them."""
    for position in range(state.steps[index].num_scheduled):
        entry = state.batch[index, position]
        request = state.requests[entry.slot]
        if request.status == FINISHED and request.num_blocks > 0 and request.in_flight_tokens == entry.tokens:
            blocks.release(state, entry.slot)


@small_kernel
def due_s(state: State, slot: int, number: int) -> float:
    """Return when a request's token with this number, from 1 on, is due; NaN where it has no deadline."""
    facts = state.facts[slot]
    due = state.requests[slot].arrival_s + facts.ttft_slo_s
    return due + (number - 1) * facts.tpot_slo_s if number > 1 else due


@kernel
def abort(state: State, slot: int) -> None:
    """Abort a request; its tokens in flight will be discarded."""
    status = state.requests[slot].status
    if status == FINISHED:
        return
    if status == PENDING:
        queues.take_pending(state, slot)
    queues.finish(state, slot)
    queues.drop_finished(state, status == WAITING)
    state.engine[0].steady = state.engine[0].stuck = 0
    queues.forget_when_idle(state)
