"""A plain reading of an engine's load as times, for engines whose steps take as long as `AFFINE` says."""

from __future__ import annotations

import math

import numpy as np

from predictor.config import EngineConfig
from predictor.state import State
from tests.strategies import AFFINE, affine_seconds, straight_lines


def load_by_hand(state: State, config: EngineConfig) -> dict[str, float]:
    """Compute the time of a step that decodes all requests, of their prefill by mean costs, and the shortest target."""
    head = state.engine[0]
    slots = [
        *state.running[: head.num_running],
        *(state.waiting[(head.waiting_head + place) % len(state.waiting)] for place in range(head.num_waiting)),
        *(state.pending[(head.pending_head + place) % len(state.pending)] for place in range(head.num_pending)),
    ]
    seats = config.max_num_seqs
    token_s = AFFINE.token_s if config.max_num_batched_tokens > 1 else 0.0
    sequence_s = (straight_lines(AFFINE.by_sequences, seats) - straight_lines(AFFINE.by_sequences, 0)) / seats
    contexts, prefill_s, targets = [], 0.0, []
    prompts = sum(int(state.requests[slot].prompt_tokens) for slot in slots)
    computed = sum(max(0, int(state.requests[slot].prompt_tokens - state.requests[slot].hit_tokens)) for slot in slots)
    responses = sum(int(state.requests[slot].expected_tokens) for slot in slots)
    sizes = [int(state.requests[slot].prompt_tokens + state.requests[slot].expected_tokens) for slot in slots]
    for slot in slots:
        request, target = state.requests[slot], float(state.facts[slot].tpot_slo_s)
        tokens, before = int(request.prompt_tokens) + int(request.output_tokens), int(request.computed_tokens)
        contexts.append(tokens)
        targets += [] if np.isnan(target) or has_missed(state, slot) else [target]
        left = tokens - before
        if left > 1:
            prefill_s += left * (token_s + AFFINE.prefill_token_s) + sequence_s
            prefill_s += AFFINE.prefill_qq_s * left**2 + AFFINE.prefill_qkv_s * left * before
    mean = sum(contexts) / max(1, len(contexts))
    decodes = [(1, mean, 1)] * min(len(slots), seats)
    efficient_s, overhead_s = math.inf, math.inf
    if targets:
        efficient_s, overhead_s = efficient_step(config, sizes, prompts, computed, responses)
    return {
        "decode_step_s": affine_seconds(decodes) if decodes else 0.0,
        "queued_prefill_s": prefill_s,
        "least_tpot_slo_s": min(targets, default=math.inf),
        "efficient_step_s": efficient_s,
        "step_overhead_s": overhead_s,
        "prefill_token_s": token_s + AFFINE.prefill_token_s + AFFINE.prefill_qq_s * config.max_num_batched_tokens,
    }


def efficient_step(
    config: EngineConfig, sizes: list[int], prompts: int, computed: int, responses: int
) -> tuple[float, float]:
    """Compute the time of the shortest step whose decodes cost hardly more than those of the best one; its overhead.

    Hardly is 3 %, or 45 % over the square root of their number if that is more; of requests that differ, of fewer.
    """
    num = len(sizes)
    if num < 16 or responses <= num:
        return math.inf, math.inf
    share, context = computed / responses, (prompts + responses / 2) / num
    most = min(
        config.max_num_seqs,
        config.max_num_batched_tokens / (1 + share),
        (config.num_gpu_blocks - 1) * config.block_size / max(1.0, context),
    )
    nums = [max(1, int(most))]
    while nums[-1] > 1:
        nums.append(int(nums[-1] / 1.5))
    best = min(nums, key=lambda one: mixed_seconds(one, share, context) / one)
    least = mixed_seconds(best, share, context) / best
    even = sum(sizes) ** 2 / sum(size**2 for size in sizes) / num
    few, enough = 0, best
    while enough - few > 1:
        middle = (few + enough) // 2
        if mixed_seconds(middle, share, context) / middle <= least * (1 + max(0.03, 0.45 / (even * middle) ** 0.5)):
            enough = middle
        else:
            few = middle
    fewer = min(enough, best // 2) or 1
    overhead_s = mixed_seconds(fewer, share, context) - fewer * least
    return mixed_seconds(enough, share, context), max(0.0, overhead_s)


def mixed_seconds(num: int, share: float, context: float) -> float:
    """Compute the time of a step with `num` decodes, and a prefill of as many tokens as they need on average."""
    tokens = int(num * share)
    seconds = AFFINE.constant_s + AFFINE.token_s * (num + tokens) + straight_lines(AFFINE.by_sequences, num)
    base, slope = AFFINE.decode_base, AFFINE.decode_slope
    if tokens:
        base, slope = AFFINE.mixed_base, AFFINE.mixed_slope
        seconds += AFFINE.prefill_s + AFFINE.prefill_token_s * tokens + AFFINE.prefill_qq_s * tokens**2
        seconds += AFFINE.prefill_qkv_s * tokens * context / 2
    return seconds + straight_lines(base, num) + straight_lines(slope, num) * num * context


def has_missed(state: State, slot: int) -> bool:
    """Return whether a response cannot have all its tokens by their deadlines any more, by what is known now."""
    request, facts = state.requests[slot], state.facts[slot]
    num = int(request.output_tokens)
    next_due_s = request.arrival_s + facts.ttft_slo_s + (num * facts.tpot_slo_s if num else 0.0)
    return bool(0 <= request.tokens_on_time < num or next_due_s < state.engine[0].now_s)
