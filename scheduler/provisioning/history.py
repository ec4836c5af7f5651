"""The recent history of a pool's requests: forecasts, outcomes, arrivals, and the requests on each instance."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from scheduler.provisioning.cold_starts import ColdStarts
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from scheduler.provisioning.load import LoadModel, load_model_of
from scheduler.provisioning.pool_state import RECENT_S, PoolState, TierNeeds
from scheduler.provisioning.trend import Trend, trend_of

BIN_S = 5.0
NUM_BINS = 48  # that a trend is read from
MAX_PLACEMENTS = 4096
MAX_OVERDUE_S = 600.0  # beyond its predicted end, after which a request without an outcome is dropped
MIN_PLACEMENTS_IN_BIN = 8  # for its token time to be used
FEW_PLACEMENTS = 256  # up to which trend and load are updated at every call
# Requests take longer than predicted, because forecasts do not know later arrivals. The ratio before any outcome, and
# the number of outcomes that weigh as much as it.
PRIOR_LATENESS, PRIOR_OUTCOMES = 1.15, 30.0
SETTLING = 1.5  # times the highest latency, after which a full instance has its usual mix of requests
MIN_BINS = 3  # for a rate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRequest:
    """A request that was sent to an instance, and its forecast."""

    request_id: str
    instance_id: str
    prompt_tokens: int
    output_tokens: int
    e2e_s: float
    next_best_e2e_s: float = math.nan  # on the second-best instance; NaN if there was no other forecast


@dataclass(slots=True)
class TimeBin:
    """Sums over a short period."""

    start_s: float
    num_placed: int = 0
    output_tokens: float = 0.0
    predicted_s: float = 0.0  # of the requests placed
    concurrency: float = 0.0  # requests on the chosen instance, over all placements
    num_ended: int = 0
    actual_s: float = 0.0  # of requests that completed
    completed_predicted_s: float = 0.0  # of the same requests
    ready_instance_s: float = 0.0
    num_ended_full: int = 0  # on instances that had been full for a while
    full_instance_s: float = 0.0


class PoolHistory:
    """Follows the requests of one pool; the caller supplies the time, which never runs backwards."""

    def __init__(self, objectives: ScalingObjectives, limits: ScalingLimits) -> None:
        """Start with an empty history."""
        self.cold_starts = ColdStarts(objectives.cold_start_s)
        self._objectives, self._calm_s = objectives, limits.calm_s
        self._bins: deque[TimeBin] = deque(maxlen=NUM_BINS + 1)
        self._placed: deque[tuple[float, PlacedRequest]] = deque(maxlen=MAX_PLACEMENTS)
        self._worst: deque[tuple[float, float]] = deque()  # falling: the highest forecasts and latencies within calm_s
        self._in_flight: dict[str, tuple[str, float, float]] = {}  # by request: instance, predicted end and latency
        self._worst_forecast_s = self._worst_outcome_s = 0.0  # since the last change
        self._num_on: Counter[str] = Counter()  # requests on each instance
        self._summed_up_to_s = -math.inf  # for trend and load
        self._trend, self._load = Trend(), LoadModel()
        self._full_since: dict[str, float] = {}
        self._max_concurrency, self._settling_s = math.inf, math.inf  # of an instance; how long a full one settles
        self._last_state_s = math.nan
        self._num_ready: int | None = None
        self._last_growth_s = -math.inf

    def add_placement(self, now_s: float, placed: PlacedRequest) -> None:
        """Add a placement; one without a finite forecast is ignored."""
        if not (math.isfinite(placed.e2e_s) and placed.e2e_s >= 0):
            return
        current = self._bin(now_s)
        current.num_placed += 1
        current.output_tokens += max(1, placed.output_tokens)
        current.predicted_s += placed.e2e_s
        current.concurrency += self._num_on[placed.instance_id]
        self._placed.append((now_s, placed))
        self._remove(placed.request_id)
        self._in_flight[placed.request_id] = (placed.instance_id, now_s + placed.e2e_s, placed.e2e_s)
        self._num_on[placed.instance_id] += 1
        self._worst_forecast_s = max(self._worst_forecast_s, placed.e2e_s)
        self._note_worst(now_s, placed.e2e_s)

    def add_end(self, now_s: float, request_id: str, e2e_s: float | None) -> None:
        """Add the end of a request; `e2e_s` is None if it did not complete."""
        if (placed := self._in_flight.get(request_id)) is not None:
            current = self._bin(now_s)
            current.num_ended += 1
            current.num_ended_full += self._has_settled(placed[0], now_s)
            if e2e_s is not None and math.isfinite(e2e_s):
                current.actual_s += e2e_s
                current.completed_predicted_s += placed[2]
        self._remove(request_id)
        if e2e_s is not None and math.isfinite(e2e_s):
            self._worst_outcome_s = max(self._worst_outcome_s, e2e_s)
            self._note_worst(now_s, e2e_s)

    def reset_worst(self) -> None:
        """Drop the worst forecast and outcome from before a change of the number of instances."""
        self._worst_forecast_s = self._worst_outcome_s = 0.0

    def removal_costs(self, now_s: float, instance_ids: Sequence[str]) -> Mapping[str, tuple[float, float]]:
        """Return for each instance the latency that its recent requests would have had in addition without it, in sum.

        The second value is the time that its requests in flight still need, in sum. Requests with no other forecast
        count with no additional latency.
        """
        added_s = dict.fromkeys(instance_ids, 0.0)
        remaining_s = dict.fromkeys(instance_ids, 0.0)
        for _, placed in takewhile(lambda entry: entry[0] > now_s - self._calm_s, reversed(self._placed)):
            if placed.instance_id in added_s and math.isfinite(placed.next_best_e2e_s):
                added_s[placed.instance_id] += max(0.0, placed.next_best_e2e_s - placed.e2e_s)
        for instance_id, predicted_end_s, _ in self._in_flight.values():
            if instance_id in remaining_s:
                remaining_s[instance_id] += max(0.0, predicted_end_s - now_s)
        return {name: (added_s[name], remaining_s[name]) for name in instance_ids}

    def state(  # noqa: PLR0913 - what else rules know of a pool
        self,
        now_s: float,
        *,
        num_ready: int,
        num_starting: int,
        ready_in_s: tuple[float, ...] = (),
        unix_s: float = 0.0,
        tiers: TierNeeds | None = None,
    ) -> PoolState:
        """Return the state of the pool, for rules."""
        self._note_full(now_s, num_ready)
        self._drop_old(now_s)
        self._sum_up()
        recent = [
            placed.e2e_s for _, placed in takewhile(lambda entry: entry[0] > now_s - RECENT_S, reversed(self._placed))
        ]
        return PoolState(
            now_s=now_s,
            unix_s=unix_s,
            num_ready=num_ready,
            num_starting=num_starting,
            worst_forecast_s=self._worst_forecast_s,
            worst_outcome_s=self._worst_outcome_s,
            worst_recent_s=self._worst[0][1] if self._worst else 0.0,
            forecast_p_s=float(np.quantile(recent, self._objectives.quantile)) if recent else 0.0,
            cold_start_s=self.cold_starts.predicted_s,
            in_flight=len(self._in_flight),
            num_ended=sum(one.num_ended for one in self._bins),
            ready_instance_s=sum(one.ready_instance_s for one in self._bins),
            num_ended_full=sum(one.num_ended_full for one in self._bins),
            full_instance_s=sum(one.full_instance_s for one in self._bins),
            since_growth_s=now_s - self._last_growth_s,
            ready_in_s=ready_in_s,
            trend=self._trend,
            load=self._load,
            tiers=tiers,
        )

    def _note_full(self, now_s: float, num_ready: int) -> None:
        """Follow the number of instances, and which of them have at least their maximum concurrency."""
        passed_s = 0.0 if math.isnan(self._last_state_s) else min(BIN_S, now_s - self._last_state_s)
        self._last_state_s = now_s
        if self._num_ready is not None and num_ready > self._num_ready:
            self._last_growth_s = now_s
        self._num_ready = num_ready
        current = self._bin(now_s)
        current.ready_instance_s += passed_s * num_ready
        current.full_instance_s += passed_s * sum(self._has_settled(name, now_s) for name in self._full_since)
        self._full_since = {
            name: self._full_since.get(name, now_s)
            for name, num in self._num_on.items()
            if num >= self._max_concurrency
        }

    def _lateness(self) -> float:
        """Return the ratio of actual to predicted latency; forecasts do not know later arrivals."""
        predicted_s = sum(one.completed_predicted_s for one in self._bins)
        actual_s = sum(one.actual_s for one in self._bins)
        prior_s = PRIOR_OUTCOMES * predicted_s / max(1, sum(one.num_ended for one in self._bins))
        return (actual_s + prior_s * PRIOR_LATENESS) / (predicted_s + prior_s) if predicted_s > 0 else PRIOR_LATENESS

    def _has_settled(self, instance_id: str, now_s: float) -> bool:
        return now_s - self._full_since.get(instance_id, math.inf) >= self._settling_s

    def _bin(self, now_s: float) -> TimeBin:
        start_s = now_s // BIN_S * BIN_S
        if not self._bins:
            self._bins.append(TimeBin(start_s))
        if start_s - self._bins[-1].start_s > NUM_BINS * BIN_S:  # no events for longer than the history
            self._bins.clear()
            self._bins.append(TimeBin(start_s - NUM_BINS * BIN_S))
        while self._bins[-1].start_s < start_s:
            self._bins.append(TimeBin(self._bins[-1].start_s + BIN_S))
        return self._bins[-1]

    def _remove(self, request_id: str) -> None:
        placed = self._in_flight.pop(request_id, None)
        if placed is not None:
            self._num_on[placed[0]] -= 1
            if not self._num_on[placed[0]]:
                del self._num_on[placed[0]]

    def _note_worst(self, now_s: float, e2e_s: float) -> None:
        while self._worst and self._worst[-1][1] <= e2e_s:
            self._worst.pop()
        self._worst.append((now_s, e2e_s))

    def _drop_old(self, now_s: float) -> None:
        while self._worst and self._worst[0][0] <= now_s - self._calm_s:
            self._worst.popleft()
        lost = [name for name, (_, end_s, _) in self._in_flight.items() if end_s < now_s - MAX_OVERDUE_S]
        for name in lost:
            self._remove(name)

    def _sum_up(self) -> None:
        """Update trend and load when a new bin begins; while there are few placements, at every call."""
        if self._bins[-1].start_s == self._summed_up_to_s and len(self._placed) > FEW_PLACEMENTS:
            return
        self._summed_up_to_s = self._bins[-1].start_s
        counts = [float(one.num_placed) for one in self._bins][:-1]
        self._trend = trend_of(np.array(counts), BIN_S) if len(counts) >= MIN_BINS else Trend()
        periods = [
            (one.concurrency / one.num_placed, one.predicted_s / one.output_tokens)
            for one in self._bins
            if one.num_placed >= MIN_PLACEMENTS_IN_BIN
        ]
        prompts = np.array([float(placed.prompt_tokens) for _, placed in self._placed])
        outputs = np.array([float(placed.output_tokens) for _, placed in self._placed])
        objectives = self._objectives
        load = load_model_of(prompts, outputs, objectives.quantile, periods, objectives.capacity)
        self._load = load = load.slowed(self._lateness())
        self._max_concurrency = load.max_concurrency(objectives.capacity, threshold_s=objectives.threshold_s, share=1.0)
        if math.isfinite(self._max_concurrency):
            self._settling_s = SETTLING * load.tail_tokens * (load.token_s + load.slowdown_s * self._max_concurrency)
