"""As many as the traffic of the next cold start will need, so that its slowest requests stay within the threshold.

What one instance bears is learnt from the forecasts: how long requests are, how long a token takes in what company, how
much memory they hold. What comes is read off the arrivals' trend. Instances that start already count. Fewer are enough
only where they would be so with room to spare, so that nothing goes up and down.
"""

from __future__ import annotations

import math

from scheduler.provisioning.limits import Aims
from scheduler.provisioning.situation import Rule, Situation, Wish

SPARE = 1.15  # what must still fit when an instance has left
TRIFLE = 0.2  # of an instance, for which none is started: what it would do the others have room for
REACTION_S = 5.0  # from an arrival to its being seen in the trend


def headroom(aims: Aims) -> Rule:
    """Look as far ahead as a cold start takes, `horizon_s` at most."""

    def rule(now: Situation) -> Wish:
        company = now.load.company(aims.room, threshold_s=aims.threshold_s, share=aims.target_share)
        bears = now.load.rate(company)
        ahead_s = min(aims.horizon_s, now.cold_start_s + REACTION_S)
        comes = now.trend.most(ahead_s)
        if bears <= 0:  # nothing was placed yet
            return Wish(num_wanted=now.num_present, num_enough=now.num_present, why="nothing is known of requests yet")
        share = comes / bears
        foreseen = _alarm(now, aims)
        wanted = max(math.ceil(share - TRIFLE), now.num_present + foreseen)
        enough = max(math.ceil(share * SPARE), math.ceil(now.trend.at(0.0) * SPARE / bears))
        alarm = f", and forecasts reach {now.forecast_p_s:.1f} s" if foreseen else ""
        return Wish(
            num_wanted=wanted,
            num_enough=now.num_present if foreseen else min(enough, now.num_present),
            why=f"{comes:.2f} requests/s within {ahead_s:.0f} s, {bears:.2f} requests/s an instance{alarm}",
            numbers={
                "arrivals_per_s": now.trend.level_per_s,
                "arrivals_ahead_per_s": comes,
                "instance_bears_per_s": bears if math.isfinite(bears) else 0.0,
                "instance_bears_requests": company if math.isfinite(company) else 0.0,
                "forecast_p_s": now.forecast_p_s,
                "threshold_s": aims.threshold_s,
                "cold_start_s": now.cold_start_s,
            },
        )

    return rule


def _alarm(now: Situation, aims: Aims) -> bool:
    """Tell whether forecasts are worse than what was reckoned with, and nobody is on the way to mend it."""
    return now.forecast_p_s > aims.threshold_s and now.num_starting == 0
