"""The numbers about an instance that policies read: sums over its engine model, and counters of its engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from predictor.compiled import direct, kernel
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.engine_view import EngineView
from predictor.forecast import Forecaster
from predictor.load import LOAD, NONE_YET, added, shown
from predictor.profile import constant_profile
from predictor.remote_kv import is_under_way
from predictor.request import NO_ADAPTER
from predictor.state import HELD, NO_TRANSFER, State

MINUTE_S = 60.0
MAX_ARRIVALS, MAX_LOOKUPS = 1 << 16, 1 << 12  # that are kept of the last minute

SUMS = (
    "num_reserved_blocks",
    "num_waiting_blocks",
    "queued_prefill_tokens",
    "context_tokens",
    "remaining_tokens",
    "num_fetching",
    "num_held_blocks",
)


def indicators_of(view: EngineView, num_reserved: int) -> dict[str, float]:
    """Return the indicators of an instance with `num_reserved` reservations."""
    engine = view.engine
    state = engine.state
    head = state.engine[0]
    sums, load = np.zeros(len(SUMS)), np.zeros(len(LOAD))
    sum_up(state, sums, load)
    return {
        "num_running": float(head.num_running),
        "num_waiting": float(head.num_waiting),
        "num_reserved": float(num_reserved),
        "num_total_blocks": float(engine.num_blocks),
        "num_free_blocks": float(head.num_free_blocks),
        **dict(zip(SUMS, sums.tolist(), strict=True)),
        **load_of(load, view.clock_rate),
        **view.counters,
        **adapter_counts(engine),
    }


def adapter_counts(engine: Engine) -> dict[str, float]:
    """Return the indicators of an engine that serves LoRA adapters."""
    if not engine.config.max_loras:
        return {}
    num_active = sum(adapter.is_active for adapter in engine.adapters())
    return {"num_adapters": float(num_active), "max_loras": float(engine.config.max_loras)}


def adapters_of(engine: Engine) -> tuple[list[int], list[int]]:
    """Return the LoRA adapters in GPU memory, or that a request there asks for, and those in host memory only."""
    loaded = engine.adapters()
    active = {adapter.number for adapter in loaded if adapter.is_active}
    state, head = engine.state, engine.state.engine[0]
    rings = (
        (state.running, 0, head.num_running),
        (state.waiting, head.waiting_head, head.num_waiting),
        (state.pending, head.pending_head, head.num_pending),
    )
    for ring, first, count in rings:
        slots = ring[(first + np.arange(count)) % len(ring)]
        active.update(state.facts.view(np.ndarray)["adapter"][slots].tolist())
    active.discard(NO_ADAPTER)
    return sorted(active), [adapter.number for adapter in loaded if adapter.number not in active]


def load_of(load: np.ndarray, clock_rate: float) -> dict[str, float]:
    """Return the load as times on the wall clock."""
    return {name: value / clock_rate for name, value in zip(LOAD, load.tolist(), strict=True)}


def warm_indicators() -> None:
    """Compile the sums, or load them from the cache, before the first request needs them."""
    engine = Engine(EngineConfig(num_gpu_blocks=32, max_model_len=64), constant_profile().step_time)
    view = EngineView(
        engine=engine, forecaster=Forecaster(engine), now_s=0.0, clock_rate=1.0, age_s=0.0, overdue_s=0.0, serial=0
    )
    indicators_of(view, 0)


@direct
@kernel
def sum_up(state: State, sums: np.ndarray, load: np.ndarray) -> None:
    """Sum over running, waiting and reserved requests, in the order of SUMS; numpy takes ten times as long.

    `load` gets the indicators of predictor/load.py.
    """
    times = NONE_YET
    head, requests = state.engine[0], state.requests
    block_size, waiting, pending = head.block_size, state.waiting, state.pending
    for position in range(head.num_running):
        request = requests[state.running[position]]
        times = added(state, state.running[position], times)
        sums[2] += max(0, request.prefill_tokens - request.computed_tokens)
        sums[3] += request.computed_tokens
        sums[4] += request.final_tokens - request.output_tokens
    for position in range(head.num_waiting):
        slot = waiting[(head.waiting_head + position) % len(waiting)]
        request = requests[slot]
        times = added(state, slot, times)
        tokens = request.prompt_tokens + request.output_tokens
        sums[1] += -(-tokens // block_size) - request.num_blocks
        if request.stage == NO_TRANSFER:
            sums[2] += tokens - request.computed_tokens
        sums[4] += request.final_tokens - request.output_tokens
        sums[5] += is_under_way(request.stage)
    for position in range(head.num_pending):
        slot = pending[(head.pending_head + position) % len(pending)]
        request = requests[slot]
        times = added(state, slot, times)
        sums[0] += -(-request.prompt_tokens // block_size)
        if request.stage == NO_TRANSFER:
            sums[2] += request.prompt_tokens
        sums[4] += request.final_tokens - request.output_tokens
    for position in range(head.num_transfers):
        request = requests[state.transfers[position]]
        if request.stage == HELD:
            sums[6] += request.num_blocks
    times_shown = shown(state, times)
    for place in range(len(LOAD)):
        load[place] = times_shown[place]


class EngineCounters:
    """Indicators from the engine's own counters, and from what happened within the last minute."""

    def __init__(self) -> None:
        """Start without any count."""
        self._arrivals: deque[float] = deque(maxlen=MAX_ARRIVALS)
        self._lookups: deque[tuple[float, int, int]] = deque(maxlen=MAX_LOOKUPS)  # when; tokens looked up; tokens hit
        self._state: Mapping[str, float] | np.void | None = None

    def count_arrivals(self, num_requests: int, now_s: float) -> None:
        """Count requests that arrived now."""
        self._arrivals.extend([now_s] * num_requests)

    def update(self, state: Mapping[str, float] | np.void, now_s: float) -> None:
        """Take the engine's counters, named as in the state file (`FORMAT.md`, section `state`)."""
        self._state = state
        queries, hits = int(state["prefix_queries"]), int(state["prefix_hits"])
        if not self._lookups or self._lookups[-1][1] != queries:
            self._lookups.append((now_s, queries, hits))
        while len(self._lookups) > 1 and self._lookups[1][0] < now_s - MINUTE_S:
            self._lookups.popleft()
        while self._arrivals and self._arrivals[0] < now_s - MINUTE_S:
            self._arrivals.popleft()

    def values(self, clock_rate: float) -> dict[str, float]:
        """Return the indicators by name."""
        values = {"requests_per_minute": float(len(self._arrivals))}
        if self._state is not None:
            values["num_preemptions_total"] = float(self._state["num_preemptions"])
            values["num_finished_total"] = float(self._state["num_outcomes"])
            if self._state["last_step_s"] > 0:
                values["step_s"] = float(self._state["last_step_s"]) / clock_rate
        if (ratio := self._hit_ratio()) is not None:
            values["kv_hit_ratio"] = ratio
        return values

    def _hit_ratio(self) -> float | None:
        """Return the share of the prompt tokens looked up within the last minute that the prefix cache held."""
        if not self._lookups:
            return None
        (_, queries, hits), (_, queries_now, hits_now) = self._lookups[0], self._lookups[-1]
        if queries_now <= queries:
            return None
        return min(1.0, max(0.0, (hits_now - hits) / (queries_now - queries)))
