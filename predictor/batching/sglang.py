"""SGLang (0.5.23): prefills go first, within a budget that reserves KV for the estimated rest of running responses.

Mirrors `Scheduler.get_next_batch_to_run`, `PrefillAdder`, `SchedulePolicy` and `ScheduleBatch.retract_decode` for text
requests without priorities and without speculation. A KV block is a page; free blocks include those that are cached.
"""

from __future__ import annotations

import numpy as np

from predictor import blocks, queues, steps
from predictor.batching import decoding
from predictor.batching.sglang_decode import (
    CLIP_MAX_NEW_TOKENS,
    HAD_RUNNING,
    IS_FULL,
    LONGEST_PREFIX,
    MAX_PREFILL_TOKENS,
    MIN_RATIO_FACTOR,
    MIXED_CHUNK,
    NUM_BATCHED,
    RATIO,
    STEPS_SEEN,
    decay_ratio,
    decode,
    init_ratio,
    mix_decodes,
)
from predictor.compiled import kernel, small_kernel
from predictor.config import EngineConfig
from predictor.state import State

MAX_SORTED = 128  # `WAITING_QUEUE_PREFIX_MATCH_MAX`: with more waiting, the queue is first come, first served
NO_LIMIT = 1 << 40  # more tokens than any engine has
SHARED_TOKENS = 32  # `IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD` and `IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD`


@kernel
def schedule(state: State) -> bool:
    """Prefill whatever can be admitted; without any, decode all running requests."""
    engine = state.engine[0]
    update_ratio(state)
    share_chunks(state)
    num_batched = decoding_requests(state)
    if num_batched != engine.memory[NUM_BATCHED] or engine.memory[HAD_RUNNING] == 0:
        engine.memory[IS_FULL] = 0
    num_prefills = admit_prefills(state, num_batched)
    if num_prefills > 0:
        num_running = num_batched
        if engine.options[MIXED_CHUNK] and engine.chunked_prefill and num_batched > 0:
            num_running = mix_decodes(state, num_prefills)
        remember(state, num_running, num_running + num_prefills if num_running else batch_size(state))
        return False
    num_decodes = decode(state)
    remember(state, num_decodes, num_decodes)
    if state.steps[steps.current(state)].num_preempted > 0 or num_decodes < engine.num_running:
        return False
    is_queue_settled = engine.num_waiting == 0 or engine.memory[IS_FULL] > 0
    return is_queue_settled and decoding.all_sampled_before(state)


@small_kernel
def batch_size(state: State) -> int:
    """Return the number of requests in the step that is being planned."""
    return state.steps[steps.current(state)].num_scheduled


@kernel
def remember(state: State, num_running: int, num_batched: int) -> None:
    """Remember the sizes of the batches, and that this step's decay of the ratio is counted."""
    engine = state.engine[0]
    engine.memory[NUM_BATCHED] = num_batched
    engine.memory[HAD_RUNNING] = num_running > 0
    engine.memory[STEPS_SEEN] = engine.num_steps + (batch_size(state) > 0)


@kernel
def update_ratio(state: State) -> None:
    """Set the new-token ratio of an engine that was idle; else count the decodes that were repeated without a plan."""
    engine = state.engine[0]
    if engine.memory[RATIO] == 0:
        engine.memory[RATIO] = init_ratio(state)
        return
    floor = init_ratio(state) * engine.options[MIN_RATIO_FACTOR]
    for _ in range(engine.num_steps - int(engine.memory[STEPS_SEEN])):
        if engine.memory[RATIO] <= floor:
            break
        decay_ratio(state)


@kernel
def share_chunks(state: State) -> None:
    """Let others hit what an unfinished prefill has computed, or is computing."""
    for position in range(state.engine[0].num_running):
        slot = state.running[position]
        if decoding.has_prefill_left(state, slot):
            blocks.share_full(state, slot, state.requests[slot].computed_tokens)


@kernel
def decoding_requests(state: State) -> int:
    """Return the number of requests in the running batch: those whose prefill is finished, or in flight."""
    count = 0
    for position in range(state.engine[0].num_running):
        count += not decoding.has_prefill_left(state, state.running[position])
    return count


@kernel
def reserved_tokens(state: State) -> float:
    """Return how many tokens the running responses are estimated to still produce."""
    engine = state.engine[0]
    reserved = 0.0
    for position in range(engine.num_running):
        slot = state.running[position]
        request = state.requests[slot]
        if not decoding.has_prefill_left(state, slot):
            left = min(request.max_tokens - request.output_tokens, int(engine.options[CLIP_MAX_NEW_TOKENS]))
            reserved += left * engine.memory[RATIO]
    return reserved


@small_kernel
def paged(state: State, num_tokens: int) -> int:
    """Return a number of tokens, rounded up to whole pages."""
    return blocks.blocks_for(num_tokens, state.engine[0].block_size) * state.engine[0].block_size


@small_kernel
def most_new_tokens(state: State, slot: int) -> int:
    """Return what is reserved for the response of a request that is admitted."""
    return min(state.requests[slot].max_tokens, int(state.engine[0].options[CLIP_MAX_NEW_TOKENS]))


@kernel
def admit_prefills(state: State, num_batched: int) -> int:
    """Continue the chunked prompt and admit from the queue; return how many prompts the step computes tokens of."""
    engine = state.engine[0]
    if not may_prefill(state, num_batched):
        return 0
    if engine.options[LONGEST_PREFIX] and engine.num_waiting <= MAX_SORTED and engine.prefix_caching:
        sort_by_prefix(state)
    mixed = num_batched if engine.options[MIXED_CHUNK] and engine.chunked_prefill else 0
    input_left = engine.max_num_batched_tokens - mixed
    chunk_left = NO_LIMIT
    if engine.chunked_prefill:
        input_left = int(engine.options[MAX_PREFILL_TOKENS]) - mixed
        chunk_left = engine.max_num_batched_tokens - mixed
    total_offset = mixed + reserved_tokens(state)
    if engine.num_running > num_batched:
        charged, reserved = continue_chunks(state, chunk_left, total_offset, mixed)
        input_left -= charged
        chunk_left -= charged
        total_offset += reserved
        mixed += charged + batch_size(state) * engine.block_size
    admit_waiting(state, num_batched, input_left, chunk_left, total_offset, mixed)
    allocate_step(state)
    return batch_size(state)


@kernel
def may_prefill(state: State, num_batched: int) -> bool:
    """Return whether a prompt may be continued, or a request admitted."""
    engine = state.engine[0]
    if engine.num_running > num_batched:  # a chunked prompt always goes on
        return True
    if num_batched == 0:
        engine.memory[IS_FULL] = 0
    if engine.memory[IS_FULL] or engine.num_waiting == 0:
        return False
    if num_batched >= engine.max_num_seqs:
        engine.memory[IS_FULL] = 1
        return False
    return True


@kernel
def continue_chunks(state: State, chunk_left: int, total_offset: float, current_offset: int) -> tuple[int, float]:
    """Continue the prompt that is partly computed; return its tokens in whole pages, and all that it reserves.

    There is at most one, unless a mirror has corrected the model.
    """
    engine = state.engine[0]
    size = engine.block_size
    available = engine.num_free_blocks * size
    charged, reserved = 0, 0.0
    for position in range(engine.num_running):
        slot = state.running[position]
        request = state.requests[slot]
        if not decoding.has_prefill_left(state, slot):
            continue
        left = steps.tokens_of(state, slot) - request.computed_tokens
        limit = min(chunk_left - charged, int(available - total_offset - reserved))
        if limit <= 0:
            limit = max(1, chunk_left - charged)  # it must go on, so that it frees its pages
        room = request.num_blocks * size + available - current_offset - charged - request.computed_tokens
        num_tokens = min(left, limit, room)
        if num_tokens > 0:
            steps.assign(state, slot, num_tokens)
            charged += paged(state, num_tokens)
            reserved += paged(state, num_tokens) + size
            reserved += most_new_tokens(state, slot) if num_tokens == left else 0
    return charged, reserved


@kernel
def admit_waiting(
    state: State, num_batched: int, input_left: int, chunk_left: int, total_offset: float, current_offset: int
) -> None:
    """Admit from the head of the queue while the budgets last; the cached pages that a request hits are held at once.

    The budgets: tokens of the prefill, of the chunk, and of the pool, less what is reserved for responses or held.
    """
    engine = state.engine[0]
    size = engine.block_size
    available = engine.num_free_blocks * size
    while engine.num_waiting > 0:
        has_capacity = available > total_offset and available > current_offset
        if has_capacity and (input_left <= 0 or chunk_left <= 0):
            return
        if batch_size(state) >= engine.max_num_seqs - num_batched:
            engine.memory[IS_FULL] = 1
        if engine.memory[IS_FULL]:
            return
        slot = queues.waiting_at(state, 0)
        num_hits = blocks.find_hits(state, slot)
        unlocked = available - blocks.count_idle(state, slot, num_hits) * size
        num_tokens = steps.tokens_of(state, slot) - num_hits * size
        if num_tokens + tokens_to_come(state, slot) + size >= unlocked - total_offset:
            engine.memory[IS_FULL] = 1 if batch_size(state) > 0 or num_batched > 0 else 0
            return
        charged = paged(state, num_tokens)
        if not engine.chunked_prefill and batch_size(state) > 0 and charged >= input_left:
            return
        reserved = most_new_tokens(state, slot)
        if charged > chunk_left:
            num_tokens = charged = chunk_left // size * size
            reserved = 0
        if num_tokens <= 0:
            return
        queues.admit(state, 0, num_hits * size)
        blocks.adopt_hits(state, slot, num_hits)
        steps.assign(state, slot, num_tokens)
        available = unlocked
        total_offset += charged + size + reserved
        current_offset += charged + size
        input_left -= charged
        chunk_left -= charged
        if available <= total_offset or available <= current_offset:
            engine.memory[IS_FULL] = 1
            return


@small_kernel
def tokens_to_come(state: State, slot: int) -> int:
    """Return what must be free for the response of a request beside its prompt."""
    request = state.requests[slot]
    return min(max(request.max_tokens - request.output_tokens, 0), int(state.engine[0].options[CLIP_MAX_NEW_TOKENS]))


@kernel
def allocate_step(state: State) -> None:
    """Allocate the pages of all requests in the step; only now, because all cached pages that they hit must be held."""
    index = steps.current(state)
    for position in range(state.steps[index].num_scheduled):
        entry = state.batch[index, position]
        blocks.allocate(state, entry.slot, state.requests[entry.slot].computed_tokens + entry.tokens)


@kernel
def sort_by_prefix(state: State) -> None:
    """Sort the queue by cached prefix, the longest first; of requests that share an uncached one, the first counts."""
    engine = state.engine[0]
    size = len(state.waiting)
    for position in range(engine.num_waiting):
        slot = queues.waiting_at(state, position)
        matched = matched_tokens(state, slot)
        state.ranks[slot].group = (
            1 if matched <= SHARED_TOKENS else 0
        )  # 1: its prompt is in the tree of waiting prompts
        state.ranks[slot].key = -min(matched, steps.tokens_of(state, slot) - 1)
        if matched <= SHARED_TOKENS and shares_prefix(state, slot, position):
            state.ranks[slot].group = 0
            state.ranks[slot].key = np.inf
    for end in range(1, engine.num_waiting):
        slot = queues.waiting_at(state, end)
        rank = end
        while rank > 0 and state.ranks[slot].key < state.ranks[queues.waiting_at(state, rank - 1)].key:
            state.waiting[queues.at(engine.waiting_head, rank, size)] = queues.waiting_at(state, rank - 1)
            rank -= 1
        state.waiting[queues.at(engine.waiting_head, rank, size)] = slot


@kernel
def matched_tokens(state: State, slot: int) -> int:
    """Return the length of the cached prefix, also where it is the whole prompt."""
    size = state.engine[0].block_size
    num_hits = blocks.find_hits(state, slot)
    num_tokens = steps.tokens_of(state, slot)
    if (num_hits + 1) * size == num_tokens:
        content = blocks.content_of(state, slot, num_hits)
        num_hits += content >= 0 and state.cached[content] >= 0
    return num_hits * size


@kernel
def shares_prefix(state: State, slot: int, end: int) -> bool:
    """Return whether a request before position `end` of the queue shares a long prefix that is not cached."""
    last = blocks.blocks_for(SHARED_TOKENS, state.engine[0].block_size) - 1
    if last >= state.requests[slot].num_hashes:
        return False
    for position in range(end):
        other = queues.waiting_at(state, position)
        is_long = last < state.requests[other].num_hashes
        if is_long and state.ranks[other].group == 1 and state.hashes[other, last] == state.hashes[slot, last]:
            return True
    return False


def longest_response(config: EngineConfig, prompt_tokens: int) -> int:
    """Return how many tokens a response can have, at least one (`init_req_max_new_tokens`)."""
    size = config.block_size
    capacity = config.num_gpu_blocks * size
    longest = min(config.max_model_len - 1, capacity - 1) - prompt_tokens - 1
    return max(1, min(longest, capacity - -(-prompt_tokens // size) * size - size - 1))


def check(config: EngineConfig) -> None:
    """Refuse a configuration that SGLang refuses at start."""
    if config.enable_chunked_prefill and config.max_num_batched_tokens % config.block_size:
        raise ValueError(
            f"max_num_batched_tokens: {config.max_num_batched_tokens} must be a multiple of block_size "
            f"{config.block_size}, which is SGLang's page_size"
        )
