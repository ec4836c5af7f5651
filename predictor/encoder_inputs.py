"""Images, audio and other inputs of an encoder: the budget of a step, and the cache of the encoder's outputs.

Mirrors vLLM 0.32 `Scheduler._try_schedule_encoder_inputs` and `EncoderCacheManager`. An input takes a range of a
prompt's tokens, and each of these counts as one output of the encoder.
"""

from __future__ import annotations

from predictor.compiled import kernel, small_kernel
from predictor.state import NONE, State

# Of an input. REFERENCED: the request refers to its output in the cache. TO_COMPUTE, REPEATED: the plan of its request
# is under way, and computes it, or an equal one before it.
ABSENT, REFERENCED, TO_COMPUTE, REPEATED = range(4)


@small_kernel
def has_some(state: State, slot: int) -> bool:
    """Return whether a request has inputs for an encoder."""
    return state.engine[0].max_encoder_tokens > 0 and state.facts[slot].num_encoder_inputs > 0


@kernel
def limit(state: State, slot: int, computed_tokens: int, num_tokens: int) -> int:
    """Return how many of the next `num_tokens` tokens a request can compute in the step that is being planned.

    It stops before an input that fits neither the budget of the step nor the cache. `commit` or `drop` must follow.
    """
    engine = state.engine[0]
    engine.encoder_tokens_left_after = engine.encoder_tokens_left
    if num_tokens <= 0:
        return num_tokens
    end, planned = computed_tokens + num_tokens, 0
    for index in range(state.facts[slot].num_encoder_inputs):
        one = state.encoder_inputs[slot, index]
        one_end = one.position + one.tokens
        if one_end <= computed_tokens:
            continue
        if one.position >= end:
            break
        before = max(0, one.position - computed_tokens)
        if engine.whole_encoder_inputs and before > 0 and computed_tokens + num_tokens < one_end:
            return before
        if is_planned_before(state, slot, index):
            one.stage = REPEATED
            continue
        if refer(state, slot, index):
            continue
        if not fits(state, one.tokens, planned):
            return before
        planned += one.tokens
        engine.encoder_tokens_left_after -= one.tokens
        one.stage = TO_COMPUTE
    return num_tokens


@small_kernel
def is_planned_before(state: State, slot: int, index: int) -> bool:
    """Return whether the plan computes an equal input of the same request already."""
    identity = state.encoder_inputs[slot, index].identity
    for other in range(index):
        one = state.encoder_inputs[slot, other]
        if one.stage == TO_COMPUTE and one.identity == identity:
            return True
    return False


@kernel
def refer(state: State, slot: int, index: int) -> bool:
    """Let a request refer to an output in the cache; return False where it is not there."""
    engine, one = state.engine[0], state.encoder_inputs[slot, index]
    place = place_of(state, one.identity)
    if place == NONE:
        return False
    entry = state.encoder_cache[place]
    if entry.num_refs == 0:
        engine.encoder_reclaimable -= entry.tokens
    if not is_referenced(state, slot, one.identity):
        entry.num_refs += 1
    one.stage = REFERENCED
    return True


@small_kernel
def is_referenced(state: State, slot: int, identity: int) -> bool:
    """Return whether a request refers to an output by one of its inputs."""
    for index in range(state.facts[slot].num_encoder_inputs):
        one = state.encoder_inputs[slot, index]
        if one.stage == REFERENCED and one.identity == identity:
            return True
    return False


@small_kernel
def place_of(state: State, identity: int) -> int:
    """Return the place of an output in the cache; NONE where it is not there."""
    for place in range(state.engine[0].num_encoder_entries):
        if state.encoder_cache[place].identity == identity:
            return place
    return NONE


@kernel
def fits(state: State, num_tokens: int, planned: int) -> bool:
    """Return whether step and cache have room for an input beside `planned` tokens; this evicts unused outputs."""
    engine = state.engine[0]
    if num_tokens > engine.encoder_tokens_left_after:
        return False
    needed = planned + num_tokens
    if needed <= engine.encoder_free:
        return True
    if needed > engine.encoder_reclaimable:
        return False
    while needed > engine.encoder_free:
        evict_oldest(state)
    return True


@kernel
def evict_oldest(state: State) -> None:
    """Remove the output that has been unused for longest."""
    engine, oldest = state.engine[0], NONE
    for place in range(engine.num_encoder_entries):
        entry = state.encoder_cache[place]
        if entry.num_refs == 0 and (oldest == NONE or entry.unused_since < state.encoder_cache[oldest].unused_since):
            oldest = place
    engine.encoder_free += state.encoder_cache[oldest].tokens
    engine.num_encoder_entries -= 1
    last = engine.num_encoder_entries
    state.encoder_cache[oldest].identity = state.encoder_cache[last].identity
    state.encoder_cache[oldest].tokens = state.encoder_cache[last].tokens
    state.encoder_cache[oldest].num_refs = state.encoder_cache[last].num_refs
    state.encoder_cache[oldest].unused_since = state.encoder_cache[last].unused_since


@kernel
def commit(state: State, slot: int) -> None:
    """Put the inputs that the step computes for a request into the cache."""
    engine = state.engine[0]
    computes = False
    for index in range(state.facts[slot].num_encoder_inputs):
        one = state.encoder_inputs[slot, index]
        if one.stage != TO_COMPUTE:
            continue
        computes = True
        entry = state.encoder_cache[engine.num_encoder_entries]
        entry.identity, entry.tokens, entry.num_refs, entry.unused_since = one.identity, one.tokens, 1, 0
        engine.num_encoder_entries += 1
        engine.encoder_free -= one.tokens
        engine.encoder_reclaimable -= one.tokens
        one.stage, one.step = REFERENCED, engine.num_steps
    for index in range(state.facts[slot].num_encoder_inputs):
        if state.encoder_inputs[slot, index].stage == REPEATED:
            refer(state, slot, index)
    if computes:
        engine.encoder_tokens_left = engine.encoder_tokens_left_after


@kernel
def drop(state: State, slot: int) -> None:
    """Forget the plan for a request that is not in the step; what it refers to it keeps."""
    for index in range(state.facts[slot].num_encoder_inputs):
        one = state.encoder_inputs[slot, index]
        if one.stage != REFERENCED:
            one.stage = ABSENT


@kernel
def release(state: State, slot: int) -> None:
    """Let a request refer to no output any more, as it has ended, is preempted, or could not be admitted."""
    drop(state, slot)
    for index in range(state.facts[slot].num_encoder_inputs):
        if state.encoder_inputs[slot, index].stage == REFERENCED:
            release_one(state, slot, index)


@kernel
def release_computed(state: State, slot: int) -> None:
    """Let a request refer no more to inputs whose tokens are all computed."""
    request = state.requests[slot]
    computed_tokens = request.computed_tokens - request.placeholders
    for index in range(state.facts[slot].num_encoder_inputs):
        one = state.encoder_inputs[slot, index]
        if one.stage == REFERENCED and one.position + one.tokens <= computed_tokens:
            release_one(state, slot, index)


@kernel
def release_one(state: State, slot: int, index: int) -> None:
    """Let a request refer to an output by one input less; an unused output stays until its place is needed."""
    engine, one = state.engine[0], state.encoder_inputs[slot, index]
    one.stage = ABSENT
    place = place_of(state, one.identity)
    if place == NONE or state.encoder_cache[place].num_refs == 0 or is_referenced(state, slot, one.identity):
        return
    entry = state.encoder_cache[place]
    entry.num_refs -= 1
    if entry.num_refs == 0:
        engine.encoder_reclaimable += entry.tokens
        engine.encoder_clock += 1
        entry.unused_since = engine.encoder_clock


@kernel
def tokens_in_step(state: State, slot: int) -> int:
    """Return how many tokens of inputs the step that is being planned computes for a request."""
    tokens = 0
    for index in range(state.facts[slot].num_encoder_inputs):
        one = state.encoder_inputs[slot, index]
        if one.stage == REFERENCED and one.step == state.engine[0].num_steps:
            tokens += one.tokens
    return tokens


@kernel
def tokens_of_step(state: State) -> int:
    """Return how many tokens of inputs the step that starts computes."""
    engine, tokens = state.engine[0], 0
    index = (engine.oldest + engine.num_in_flight) % 2
    for position in range(state.steps[index].num_scheduled):
        tokens += tokens_in_step(state, state.batch[index, position].slot)
    return tokens
