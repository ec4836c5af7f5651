"""As few instances as keep forecasts within the threshold after a cold start; fewer only with spare capacity.

The capacity of an instance is read from forecasts, and from measured throughput once instances have been full. Arrivals
follow the trend. The number of requests in flight is projected until after a cold start, where starting instances
count from when they will be ready; from it follows how long a new request would wait then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.provisioning.limits import ScalingObjectives
from scheduler.provisioning.pool_state import RECENT_S, PoolState, Rule, ScalingTarget

REACTION_S = 5.0  # from an arrival until the trend shows it
PRIOR_ENDS = 20.0  # requests ended on full instances that weigh as much as the forecasts
PROVEN_S = 60.0  # ready time of instances after which their throughput is a lower bound of the capacity
# Spare capacity after an instance is removed, for each SPARE_FOR_S of a cold start; MAX_SPARE at most.
SPARE, SPARE_FOR_S = 0.15, 60.0
MAX_SPARE = 0.5
NUM_PERIODS = 60  # of a projection


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProjection:
    """The arrivals until after a cold start, and the capacity of an instance."""

    state: PoolState
    max_concurrency: float  # of an instance
    requests_per_s: float  # that an instance serves
    base_s: float  # latency of the longest responses on a full instance
    ahead_s: float
    drain_s: float  # within which a queue has to be gone

    def arrivals_per_s(self, in_s: float) -> float:
        """Return a cautious arrival rate at a time ahead; from `ahead_s` on it is constant."""
        return self.state.trend.cautious(min(in_s, self.ahead_s))

    @property
    def max_arrivals_per_s(self) -> float:
        """The highest arrival rate until `ahead_s`."""
        return max(self.arrivals_per_s(0.0), self.arrivals_per_s(self.ahead_s))

    def slowest_s(self, num: int) -> float:
        """Project the load with this number of instances; return the highest latency at the end."""
        if not math.isfinite(self.max_concurrency):
            return self.base_s
        state = self.state
        cold_start_s = self.ahead_s if num > state.num_present else 0.0
        starting = sorted(state.ready_in_s[-state.num_starting :]) if state.num_starting else []
        starting += [self.ahead_s] * (state.num_starting - len(starting) + max(0, num - state.num_present))
        num_leaving = max(0, state.num_present - num)
        end_s = max(self.ahead_s, cold_start_s) + self.drain_s
        period_s = end_s / NUM_PERIODS
        in_flight = float(state.in_flight)
        for period in range(NUM_PERIODS):
            at_s = (period + 0.5) * period_s
            num_ready = max(0, state.num_ready - num_leaving) + sum(ready_s <= at_s for ready_s in starting)
            served = self.requests_per_s * min(float(num_ready), in_flight / self.max_concurrency)
            in_flight = max(0.0, in_flight + (self.arrivals_per_s(at_s) - served) * period_s)
        waiting = max(0.0, in_flight - num * self.max_concurrency)
        return self.base_s + (waiting / (self.requests_per_s * num) if num else math.inf)


def headroom(objectives: ScalingObjectives) -> Rule:
    """Return a rule that plans for a cold start ahead, `horizon_s` at most."""
    limit_s = objectives.threshold_s * objectives.target_share

    def rule(state: PoolState) -> ScalingTarget:
        projection = projection_of(state, objectives)
        num_present = state.num_present
        if projection is None:
            return ScalingTarget(num_wanted=num_present, num_enough=num_present, why="no requests observed yet")
        is_alarming = _is_alarming(state, objectives)
        aim_s = max(limit_s, projection.base_s)
        arrivals_per_s = projection.max_arrivals_per_s
        maximum = num_present + math.ceil(
            2 * (arrivals_per_s / projection.requests_per_s + state.in_flight / projection.max_concurrency)
        )
        wanted = next((num for num in range(num_present, maximum) if projection.slowest_s(num) <= aim_s), maximum)
        if state.trend.slope_per_s2 > 0:  # while arrivals grow, do not wait until a queue forms
            wanted = max(wanted, min(maximum, math.ceil(arrivals_per_s / projection.requests_per_s)))
        spare = min(MAX_SPARE, SPARE * max(1.0, state.cold_start_s / SPARE_FOR_S))
        steady = math.ceil(arrivals_per_s * (1 + spare) / projection.requests_per_s)
        fewer = range(steady, num_present) if state.trend.slope_per_s2 <= 0 else ()
        enough = next((num for num in fewer if projection.slowest_s(num) <= aim_s), num_present)
        slowest_s = projection.slowest_s(num_present)
        alarm = f"; forecasts reach {state.forecast_p_s:.1f} s" if is_alarming else ""
        return ScalingTarget(
            num_wanted=max(wanted, num_present + is_alarming),
            num_enough=num_present if is_alarming else min(enough, num_present),
            why=f"{arrivals_per_s:.2f} requests/s arrive within {projection.ahead_s:.0f} s, an instance serves "
            f"{projection.requests_per_s:.2f} requests/s: {slowest_s:.1f} s with {num_present} instances{alarm}",
            numbers={
                "arrivals_per_s": state.trend.level_per_s,
                "arrivals_ahead_per_s": arrivals_per_s,
                "instance_requests_per_s": _finite(projection.requests_per_s),
                "instance_max_requests": _finite(projection.max_concurrency),
                "slowest_ahead_s": slowest_s,
                "forecast_p_s": state.forecast_p_s,
                "threshold_s": objectives.threshold_s,
                "cold_start_s": state.cold_start_s,
            },
        )

    return rule


def projection_of(state: PoolState, objectives: ScalingObjectives) -> LoadProjection | None:
    """Return the projection for a state; None before the first placement."""
    load = state.load
    max_concurrency = load.max_concurrency(objectives.capacity, threshold_s=objectives.threshold_s, share=1.0)
    predicted_per_s = load.requests_per_s(max_concurrency)
    if predicted_per_s <= 0:
        return None
    requests_per_s = predicted_per_s
    if math.isfinite(predicted_per_s):
        requests_per_s = (state.num_ended_full + PRIOR_ENDS) / (state.full_instance_s + PRIOR_ENDS / predicted_per_s)
        if state.ready_instance_s > PROVEN_S:
            requests_per_s = max(requests_per_s, state.num_ended / state.ready_instance_s)
    concurrency = _finite(max_concurrency)
    return LoadProjection(
        state=state,
        max_concurrency=max_concurrency,
        requests_per_s=requests_per_s,
        base_s=min(objectives.threshold_s, load.tail_tokens * (load.token_s + load.slowdown_s * concurrency)),
        ahead_s=min(objectives.horizon_s, state.cold_start_s + REACTION_S),
        drain_s=objectives.threshold_s,
    )


def _is_alarming(state: PoolState, objectives: ScalingObjectives) -> bool:
    """Return whether forecasts exceed the threshold although no instance is starting or has recently started."""
    return state.forecast_p_s > objectives.threshold_s and state.num_starting == 0 and state.since_growth_s >= RECENT_S


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
