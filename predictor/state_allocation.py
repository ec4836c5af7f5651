"""The state of an idle engine, and its growth."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import typeof
from numba.core import types

from predictor.config import BIDIRECTIONAL, FETCHING_ROLES, HOLDING_ROLES, KV_LAYOUTS, RECOMPUTE, EngineConfig
from predictor.speculation import ExpectedDrafts
from predictor.state import (
    ADAPTER,
    BLOCK,
    CLIENT,
    ENCODER_INPUT,
    ENCODER_OUTPUT,
    ENGINE,
    FACTS,
    NO_CONTENT,
    NONE,
    RANK,
    REQUEST,
    SCHEDULED,
    STEP,
    TWO_ENDED_BLOCK,
    State,
)
from predictor.step_time import StepTime
from predictor.tabulated_costs import Costs, tabulate
from predictor.vllm_versions import rules_for


@cache
def state_type() -> types.Type:
    """Return the type of every state for the compiler."""
    state = allocate(EngineConfig(), tabulate(StepTime(), 1, 1), num_blocks=1, tracked=True)
    return typeof(state)  # type: ignore[no-untyped-call]


def _set_version_rules(engine: np.record, config: EngineConfig) -> None:
    """Set the rules in which versions of vLLM differ."""
    rules = rules_for(config.vllm_version).rules
    engine.spares_lone_prefill = rules.spares_lone_prefill
    engine.holding_first = rules.holding_first or not engine.by_priority
    engine.goes_on_after_self_preemption = rules.goes_on_after_self_preemption and engine.by_priority


def allocate(
    config: EngineConfig,
    costs: Costs,
    *,
    num_blocks: int,
    tracked: bool,
    max_clients: int = 0,
    num_slots: int = 64,
) -> State:
    """Make the state of an idle engine; `num_blocks` are available to requests, and their contents `tracked` or not."""
    tracked_blocks = num_blocks if tracked else 0
    state = State(
        engine=np.zeros(1, ENGINE).view(np.recarray),
        requests=np.zeros(num_slots, REQUEST).view(np.recarray),
        running=np.zeros(num_slots, np.int32),
        waiting=np.zeros(num_slots, np.int32),
        pending=np.zeros(num_slots, np.int32),
        transfers=np.zeros(num_slots, np.int32),
        preempted=np.zeros(num_slots, np.int32),
        steps=np.zeros(2, STEP).view(np.recarray),
        batch=np.zeros((2, num_slots), SCHEDULED).view(np.recarray),
        clients=np.zeros(max_clients, CLIENT).view(np.recarray),
        two_ended_blocks=np.zeros(num_blocks if config.kv_layout == BIDIRECTIONAL else 0, TWO_ENDED_BLOCK).view(
            np.recarray
        ),
        blocks=np.zeros(tracked_blocks, BLOCK).view(np.recarray),
        tables=np.zeros((num_slots, 1), np.int32),
        facts=no_facts(num_slots),
        hashes=np.zeros((num_slots, 1), np.int64),
        turn_starts=np.zeros(config.block_size + 2, np.int32),
        turns=np.zeros(num_slots, np.int32),
        ranks=np.zeros(num_slots, RANK).view(np.recarray),
        cached=np.full(1, NONE, np.int32),
        adapters=np.zeros(config.num_cpu_loras, ADAPTER).view(np.recarray),
        step_adapters=np.zeros(config.max_loras, np.int64),
        encoder_cache=np.zeros(config.encoder_cache_size, ENCODER_OUTPUT).view(np.recarray),
        encoder_inputs=np.zeros((num_slots, 1), ENCODER_INPUT).view(np.recarray),
        expected_accepted=np.zeros(config.num_speculative_tokens + 1),
        costs=costs,
    )
    _set_limits(state.engine[0], config, num_blocks=num_blocks, tracked=tracked)
    _set_version_rules(state.engine[0], config)
    _set_estimator(state.engine[0], config)
    _set_transfers(state.engine[0], config)
    _set_speculation(state, config)
    _set_inputs(state, config)
    _chain_free_blocks(state)
    return state


def _set_limits(engine: np.record, config: EngineConfig, *, num_blocks: int, tracked: bool) -> None:
    engine.max_num_seqs = config.max_num_seqs
    engine.max_num_batched_tokens = config.max_num_batched_tokens
    engine.block_size = config.block_size
    engine.num_blocks = engine.num_free_blocks = num_blocks
    engine.max_model_len = config.max_model_len
    engine.by_priority = engine.queue_by_priority = config.scheduling_policy == "priority"
    engine.prefix_caching = tracked
    engine.chunked_prefill = bool(config.enable_chunked_prefill)
    engine.pipeline_depth = config.pipeline_depth
    engine.long_prefill_token_threshold = config.long_prefill_token_threshold
    engine.adaptive_threshold = config.long_prefill_token_threshold_adaptive
    engine.watermark_blocks = config.watermark_blocks
    engine.reserve_full_isl = config.scheduler_reserve_full_isl
    engine.kv_layout = KV_LAYOUTS.index(config.kv_layout)
    engine.swap_token_s = config.swap_token_s


def _set_estimator(engine: np.record, config: EngineConfig) -> None:
    engine.estimator_factor = config.estimator_factor
    engine.estimator_noise = config.estimator_noise
    engine.estimator_momentum = config.estimator_momentum
    engine.estimator_seed = config.estimator_seed
    engine.pace = engine.correction = 1.0
    engine.region_pace = 1.0


def _set_transfers(engine: np.record, config: EngineConfig) -> None:
    engine.fetches = config.kv_role in FETCHING_ROLES
    engine.drops_stale = config.kv_role in HOLDING_ROLES
    engine.defers_frees = config.overlaps_fetches
    engine.recomputes = config.kv_load_failure_policy == RECOMPUTE
    engine.transfer_base_s = config.kv_transfer_base_s
    engine.transfer_token_s = config.kv_bytes_per_token / config.kv_transfer_bytes_per_s
    engine.transfer_block_s = config.kv_transfer_block_s
    engine.transfer_shared = config.kv_transfer_shared
    engine.next_transfer_s = math.inf
    engine.transfer_pace = 1.0


def _chain_free_blocks(state: State) -> None:
    """Put all KV blocks into the list of free ones, without contents."""
    engine, num_blocks = state.engine[0], len(state.blocks)
    engine.free_head, engine.free_tail = (0, num_blocks - 1) if num_blocks else (NONE, NONE)
    state.two_ended_blocks.left = state.two_ended_blocks.right = NONE
    state.blocks.content = NO_CONTENT
    state.blocks.next_same = NONE
    state.blocks.next_free = np.append(np.arange(1, num_blocks), NONE)[:num_blocks]
    state.blocks.previous_free = np.arange(-1, num_blocks - 1)


def _set_inputs(state: State, config: EngineConfig) -> None:
    engine = state.engine[0]
    engine.max_loras, engine.max_cpu_loras = config.max_loras, config.num_cpu_loras
    engine.lora_load_s, engine.lora_activate_s = config.lora_load_s, config.lora_activate_s
    engine.max_encoder_tokens = config.max_num_encoder_input_tokens
    engine.whole_encoder_inputs = config.disable_chunked_mm_input
    engine.encoder_token_s = config.encoder_token_s
    engine.encoder_free = engine.encoder_reclaimable = config.encoder_cache_size


def _set_speculation(state: State, config: EngineConfig) -> None:
    engine = state.engine[0]
    engine.num_speculative_tokens = config.num_speculative_tokens
    engine.num_lookahead_tokens = config.num_lookahead_tokens
    engine.draft_slots = config.speculation.draft_slots
    engine.drops_last_hit = config.speculation.drops_last_hit
    engine.num_prefill_lookahead_tokens = config.num_prefill_lookahead_tokens
    engine.draft_step_s = config.draft_step_s
    expect_drafts(state, config.configured_drafts)


def expect_drafts(state: State, drafts: ExpectedDrafts) -> None:
    """Set what is expected of draft tokens."""
    width = len(state.expected_accepted)
    if len(drafts.accepted) != width:
        raise ValueError(f"accepted: {len(drafts.accepted)} values are not the {width} of this engine")
    state.expected_accepted[:] = drafts.accepted
    state.engine[0].proposed_tokens = drafts.proposed_tokens
    state.engine[0].proposal_share = drafts.proposal_share


def no_facts(*shape: int) -> np.recarray[Any, Any]:
    """Make an array of default facts, for requests whose clients send none."""
    return np.full(shape, np.array((math.nan, math.nan, 1.0, 0, 0, 0, 0), FACTS)).view(np.recarray)


def widen(
    state: State, *, num_slots: int, blocks_per_request: int, num_contents: int, num_encoder_inputs: int = 0
) -> State:
    """Return the state with room for at least these numbers; the same state where it has it already."""
    old_slots, old_width = state.tables.shape
    if (
        num_slots <= old_slots
        and blocks_per_request <= old_width
        and num_contents <= len(state.cached)
        and (num_encoder_inputs == 0 or num_encoder_inputs <= state.encoder_inputs.shape[1])
    ):
        return state
    old_inputs = state.encoder_inputs.shape[1]
    slots = _grown(old_slots, num_slots)
    width = _grown(old_width, blocks_per_request)
    wide = state._replace(
        requests=_padded(state.requests, (slots,)).view(np.recarray),
        running=_padded(state.running, (slots,)),
        transfers=_padded(state.transfers, (slots,)),
        preempted=_padded(state.preempted, (slots,)),
        turns=_padded(state.turns, (slots,)),
        ranks=_padded(state.ranks, (slots,)).view(np.recarray),
        waiting=_straightened(state.waiting, state.engine[0].waiting_head, slots),
        pending=_straightened(state.pending, state.engine[0].pending_head, slots),
        batch=_padded(state.batch, (2, slots)).view(np.recarray),
        tables=_padded(state.tables, (slots, width)),
        facts=np.append(state.facts, no_facts(slots - old_slots)).view(np.recarray),
        hashes=_padded(state.hashes, (slots, width)),
        cached=_padded(state.cached, (_grown(len(state.cached), num_contents),), NONE),
        encoder_inputs=_padded(state.encoder_inputs, (slots, _grown(old_inputs, num_encoder_inputs))).view(np.recarray),
    )
    wide.engine[0].waiting_head = wide.engine[0].pending_head = 0
    return wide


def _grown(old: int, needed: int) -> int:
    return old if needed <= old else max(needed, 2 * old)


def _padded(array: np.ndarray, shape: tuple[int, ...], fill: int = 0) -> np.ndarray:
    wide = np.full(shape, fill, array.dtype) if fill else np.zeros(shape, array.dtype)
    wide[tuple(slice(n) for n in array.shape)] = array
    return wide


def _straightened(ring: np.ndarray, head: int, size: int) -> np.ndarray:
    return _padded(np.roll(ring, -head), (size,))
