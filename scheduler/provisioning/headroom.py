"""The fewest with which forecasts stay within the threshold after a cold start, and fewer only with room to spare.

What one instance serves is read off the forecasts, and, as soon as some are full, off what they really serve. Requests
come as the trend says; those who are there already, and instances that start, count from when they will. From that the
requests under way are followed to a cold start from now and on, and with them how long a new one would wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.provisioning.limits import Aims
from scheduler.provisioning.pool_state import LATELY_S, PoolState, Rule, ScalingTarget

REACTION_S = 5.0  # from an arrival to its being seen in the trend
DOUBT = 20.0  # ends on full instances that weigh as much as what forecasts say
PROVEN_S = 60.0  # of instances being there, after which what they have done is no accident
SPARE, SPARE_FOR_S = 0.15, 60.0  # that must still fit when one has left, for each time that it takes to get it back
MOST_SPARE = 0.5  # however long that takes
PARTS = 60  # that time is followed in


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What comes, and what an instance does about it."""

    now: PoolState
    full: float  # requests that an instance serves at a time
    bears_per_s: float
    base_s: float  # the longest answers' time on a full instance
    ahead_s: float
    drain_s: float  # within which what has piled up is to be gone

    def arrivals_per_s(self, in_s: float) -> float:
        """Tell the rate then, on the safe side; beyond the time looked ahead it stays as it is."""
        return self.now.trend.safe(min(in_s, self.ahead_s))

    @property
    def most_per_s(self) -> float:
        """The highest rate within the time looked ahead."""
        return max(self.arrivals_per_s(0.0), self.arrivals_per_s(self.ahead_s))

    def slowest_s(self, num: int) -> float:
        """Follow requests with so many instances as soon as may be; tell how slow the slowest are in the end."""
        if not math.isfinite(self.full):
            return self.base_s
        now = self.now
        cold_s = self.ahead_s if num > now.num_present else 0.0
        coming = sorted(now.ready_in_s[-now.num_starting :]) if now.num_starting else []
        coming += [self.ahead_s] * (now.num_starting - len(coming) + max(0, num - now.num_present))
        leaving = max(0, now.num_present - num)
        end_s = max(self.ahead_s, cold_s) + self.drain_s
        part_s = end_s / PARTS
        under_way = float(now.in_flight)
        for part in range(PARTS):
            at_s = (part + 0.5) * part_s
            there = max(0, now.num_ready - leaving) + sum(one <= at_s for one in coming)
            served = self.bears_per_s * min(float(there), under_way / self.full)
            under_way = max(0.0, under_way + (self.arrivals_per_s(at_s) - served) * part_s)
        waiting = max(0.0, under_way - num * self.full)
        return self.base_s + (waiting / (self.bears_per_s * num) if num else math.inf)


def headroom(aims: Aims) -> Rule:
    """Look as far ahead as a cold start takes, `horizon_s` at most."""
    limit_s = aims.threshold_s * aims.target_share

    def rule(now: PoolState) -> ScalingTarget:
        seen = outlook(now, aims)
        if seen is None:  # nothing was placed yet
            return ScalingTarget(
                num_wanted=now.num_present, num_enough=now.num_present, why="nothing is known of requests yet"
            )
        foreseen = _alarm(now, aims)
        aim_s = max(limit_s, seen.base_s)
        most = now.num_present + math.ceil(2 * (seen.most_per_s / seen.bears_per_s + now.in_flight / seen.full))
        wanted = next((num for num in range(now.num_present, most) if seen.slowest_s(num) <= aim_s), most)
        if now.trend.slope_per_s2 > 0:  # who is asked for now is needed soon anyway: no queue has to call for it
            wanted = max(wanted, min(most, math.ceil(seen.most_per_s / seen.bears_per_s)))
        spare = min(MOST_SPARE, SPARE * max(1.0, now.cold_start_s / SPARE_FOR_S))
        steady = math.ceil(seen.most_per_s * (1 + spare) / seen.bears_per_s)
        fewer = range(steady, now.num_present) if now.trend.slope_per_s2 <= 0 else ()
        enough = next((num for num in fewer if seen.slowest_s(num) <= aim_s), now.num_present)
        slowest_s = seen.slowest_s(now.num_present)
        alarm = f", and forecasts reach {now.forecast_p_s:.1f} s" if foreseen else ""
        return ScalingTarget(
            num_wanted=max(wanted, now.num_present + foreseen),
            num_enough=now.num_present if foreseen else min(enough, now.num_present),
            why=f"{seen.most_per_s:.2f} requests/s within {seen.ahead_s:.0f} s, {seen.bears_per_s:.2f} requests/s an "
            f"instance: {slowest_s:.1f} s with {now.num_present}{alarm}",
            numbers={
                "arrivals_per_s": now.trend.level_per_s,
                "arrivals_ahead_per_s": seen.most_per_s,
                "instance_bears_per_s": seen.bears_per_s if math.isfinite(seen.bears_per_s) else 0.0,
                "instance_bears_requests": seen.full if math.isfinite(seen.full) else 0.0,
                "slowest_ahead_s": slowest_s,
                "forecast_p_s": now.forecast_p_s,
                "threshold_s": aims.threshold_s,
                "cold_start_s": now.cold_start_s,
            },
        )

    return rule


def outlook(now: PoolState, aims: Aims) -> Outlook | None:
    """Put together what is known; None while that is nothing."""
    full = now.load.company(aims.room, threshold_s=aims.threshold_s, share=1.0)
    planned = now.load.rate(full)
    if planned <= 0:
        return None
    bears_per_s = planned
    if math.isfinite(planned):
        bears_per_s = (now.full_ends + DOUBT) / (now.full_s + DOUBT / planned)
        if now.ready_s > PROVEN_S:
            bears_per_s = max(bears_per_s, now.ends / now.ready_s)  # they have done so much already
    company = full if math.isfinite(full) else 0.0
    return Outlook(
        now=now,
        full=full,
        bears_per_s=bears_per_s,
        base_s=min(aims.threshold_s, now.load.tail_tokens * (now.load.pace_s + now.load.drag_s * company)),
        ahead_s=min(aims.horizon_s, now.cold_start_s + REACTION_S),
        drain_s=aims.threshold_s,
    )


def _alarm(now: PoolState, aims: Aims) -> bool:
    """Tell whether forecasts are worse than what was reckoned with, and nobody mends it, or has just come to."""
    return now.forecast_p_s > aims.threshold_s and now.num_starting == 0 and now.same_for_s >= LATELY_S
