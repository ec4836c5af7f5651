"""How long a decision may take, and how long a request may be held so that its caller still gets the reply."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.admission.wait import MAX_BACKGROUND_WAIT_S
from scheduler.core import SchedulerCore
from scheduler.policy import Policy

DECIDE_S = 1.0  # where the policy holds no request
HOLD_RATIO = 1.25  # over the longest wait: late requests wait that long after their first token was due
DEADLINES_PER_DECISION = 3  # of the sidecars, within which a decision is made


def longest_wait_s(policy: Policy) -> float:
    """Return how long a policy holds a request at most; 0 where it holds none."""
    if not policy.holds:
        return 0.0
    return max(policy.hold_s, MAX_BACKGROUND_WAIT_S) if policy.keeps_deadlines else policy.hold_s


def schedule_s_of(policy: Policy) -> float:
    """Return within which time a decision by a policy is made."""
    return max(DECIDE_S, HOLD_RATIO * longest_wait_s(policy))


def max_wait_s(left_s: float | None, sidecar_deadline_s: float) -> float:
    """Return how long a request may be held so that its caller, whose deadline is in `left_s`, still gets the reply."""
    if left_s is None:
        return math.inf
    return float(left_s) - min(left_s / 2, DEADLINES_PER_DECISION * sidecar_deadline_s)


def require_schedule_s(schedule_s: float | None) -> None:
    """Refuse a time that no decision can have."""
    if schedule_s is not None and not (math.isfinite(schedule_s) and schedule_s > 0):
        raise ValueError(f"schedule_s: must be a time above 0, not {schedule_s}")


@dataclass(frozen=True, slots=True)
class DecisionTime:
    """The time for decisions in this process: the one that is given, or else what the policy needs."""

    core: SchedulerCore
    given_s: float | None
    sidecar_deadline_s: float

    def within_s(self) -> float:
        """Return the maximum time of a decision by the present policy."""
        return schedule_s_of(self.core.policy) if self.given_s is None else self.given_s

    def max_wait_s(self) -> float:
        """Return how long a request may be held within it."""
        return max_wait_s(self.within_s(), self.sidecar_deadline_s)
