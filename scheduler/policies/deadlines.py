"""Conditions of policies that keep deadlines: where a request may go now; it is held while no instance meets them.

A request with deadlines goes where it attains them and no other misses one because of it. One that would wait in an
engine for longer than `backlog` seconds waits at the scheduler instead: there it can still go to another instance,
tenants get their turns, and a request that will be late leaves in time. Where its prefix is cached it may wait longer,
by `hits` times the prefill that this saves.

Background requests have no deadlines, are late already or are deferred. They go where no other misses one because of
them, and all keep `slack` or `late_slack` seconds for the next request with deadlines. In the engine they wait for at
most a third of `backlog`, so that they use only the time that others leave.
"""

from __future__ import annotations

NO_OTHER_MISSES = "others_missed < 1 and predicted_preemptions + others_preempted < 1"
KEEPS = f"predicted_attained > 0.5 and {NO_OTHER_MISSES}"
WITH_SHORT_QUEUE = "predicted_queue_s <= {backlog} + {hits} * cached_prefill_s"
BACKGROUND_WITH_SHORT_QUEUE = "predicted_queue_s <= {backlog} / 3"
BACKLOG_S, SLACK_S, LATE_SLACK_S = 0.3, 0.05, 1.0
# Both are true where a sidecar does not say how much slack there is, or how strict its instance is.
LEAVES_SLACK = "otherwise(least_slack_s, 1e9) >= ({late_slack} if late > 0 else {slack})"
FITS_TIER = "otherwise(tier_fits, 1) > 0"
WITHOUT_TIERS = "tier_closed < 1 and ({affinity} <= 0 or tiers_matter < 1)"
ELIGIBLE = f"({WITHOUT_TIERS} or {FITS_TIER} or highest(tier_fits) < 1)"
ADMITS = f"{KEEPS} and {ELIGIBLE}"
