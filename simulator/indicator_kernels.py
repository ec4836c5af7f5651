"""Compiled code that writes what schedulers see of simulated engines: indicators, and cached parts of a prompt."""

from __future__ import annotations

import numpy as np

from predictor import blocks, load, queues
from predictor.compiled import direct, kernel, small_kernel
from predictor.state import HELD, NO_TRANSFER, NONE
from simulator.fleet_arrays import EngineArrays, Requests, engine_at
from simulator.predicted_lengths import remaining_tokens_of

# The indicators that `write_indicators` writes, in the order of its argument `rows`.
INDICATORS = (
    "num_running", "num_waiting", "num_reserved", "num_total_blocks", "num_free_blocks", "num_reserved_blocks",
    "num_waiting_blocks", "queued_prefill_tokens", "context_tokens", "remaining_tokens", "kv_hit_ratio", "pace",
    "step_s", "num_preemptions_total", "num_finished_total", "num_fetching", "num_held_blocks", *load.LOAD,
)  # fmt: skip


@small_kernel
def write_changed(fleet: EngineArrays, now_s: float, rows: np.ndarray, indicators: np.ndarray) -> None:
    """Write the indicators of the engines that have changed since they were last written."""
    for index in range(len(fleet.instances)):
        instance = fleet.instances[index]
        if instance.changed or fleet.stack.engine[index, 0].num_pending > 0:
            instance.changed = 0
            write_indicators(fleet, index, now_s, rows, indicators[:, index])


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
    times_shown = load.shown(state, times)
    for place in range(len(load.LOAD)):
        indicators[rows[17 + place]] = times_shown[place]


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


count_hits_directly = direct(count_hits)
