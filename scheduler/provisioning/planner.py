"""Turns the target of a rule into a decision: within limits, not too fast, and without oscillation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.provisioning.history import PoolHistory
from scheduler.provisioning.limits import HOUR_S, ScalingLimits
from scheduler.provisioning.pool_state import Numbers, PoolState, Rule, ScalingTarget, TierNeeds

START, DRAIN, NOTHING = "start", "drain", "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """What to do now: start a number of instances, drain named ones, or nothing; and why."""

    kind: str
    num: int = 0
    instance_ids: tuple[str, ...] = ()
    num_present: int = 0
    why: str = ""
    numbers: Numbers = field(default_factory=dict)

    @property
    def num_desired(self) -> int:
        """The number of instances after the decision is carried out."""
        return self.num_present + (self.num if self.kind == START else -len(self.instance_ids))


class Planner:
    """Decides about the size of one pool: `plan` returns a decision, `applied` records one that is carried out."""

    def __init__(self, rule: Rule, limits: ScalingLimits, history: PoolHistory) -> None:
        """Start without earlier changes."""
        self._rule, self._limits, self._history = rule, limits, history
        self._enough: deque[tuple[float, int]] = deque()  # falling: the highest `num_enough` within the calm period
        self._enough_since_s = math.nan  # start of the history of `num_enough`
        self._last_change_s = -math.inf
        self._starts: deque[float] = deque()  # within the last hour

    def cooldown_left_s(self, now_s: float) -> float:
        """Return the time until the next start is allowed."""
        return max(0.0, self._last_change_s + self._limits.cooldown_s - now_s)

    def plan(  # noqa: PLR0913 - the state of a pool
        self,
        now_s: float,
        ready: Sequence[str],
        num_starting: int,
        *,
        unix_s: float = 0.0,
        rule: Rule | None = None,
        tiers: TierNeeds | None = None,
    ) -> ScalingDecision:
        """Return what to do now; with `rule`, what that rule would decide, without effect on later decisions.

        Where there are tiers, only idle instances of the best-effort pool leave, unless there are too many instances.
        """
        state = self._history.state(
            now_s,
            num_ready=len(ready),
            num_starting=num_starting,
            ready_in_s=self._ready_in_s(now_s, num_starting),
            unix_s=unix_s,
            tiers=tiers,
        )
        target = (rule or self._rule)(state)
        if rule is None:
            self._note_enough(state, target)
        minimum, maximum = self._limits.min_instances, self._limits.max_instances
        if state.num_present < minimum:
            num = minimum - state.num_present
            return self._start(state, num, f"fewer instances than min_instances {minimum}", target.numbers)
        if min(target.num_wanted, maximum) > state.num_present:
            return self._grow(state, target)
        num_needed = max(minimum, target.num_enough if rule is not None else self._max_enough(state), 0)
        if state.num_present > num_needed or state.num_present > maximum:
            return self._shrink(state, target, ready, num_needed)
        return _nothing(state, target.why, target.numbers)

    def applied(self, now_s: float, decision: ScalingDecision) -> None:
        """Record that a decision is carried out."""
        self._last_change_s = now_s
        self._enough.clear()
        self._enough_since_s = now_s
        self._starts.extend([now_s] * decision.num)
        self._history.reset_worst()

    def _note_enough(self, state: PoolState, target: ScalingTarget) -> None:
        if math.isnan(self._enough_since_s):
            self._enough_since_s = state.now_s
        while self._enough and self._enough[-1][1] <= target.num_enough:
            self._enough.pop()
        self._enough.append((state.now_s, target.num_enough))
        calm_s = self._calm_s(state)
        while self._enough[0][0] < state.now_s and self._enough[0][0] <= state.now_s - calm_s:
            self._enough.popleft()

    def _ready_in_s(self, now_s: float, num_starting: int) -> tuple[float, ...]:
        """Return when the instances that still start, which are the latest, should be ready."""
        cold_start_s = self._history.cold_starts.predicted_s
        latest = list(self._starts)[-num_starting:] if num_starting else []
        return tuple(max(0.0, start_s + cold_start_s - now_s) for start_s in latest)

    def _calm_s(self, state: PoolState) -> float:
        """Return how long fewer instances must have been enough; longer where a new one takes longer to start."""
        return max(self._limits.calm_s, state.cold_start_s)

    def _max_enough(self, state: PoolState) -> int:
        """Return the highest `num_enough` of the calm period; the present number until one has passed."""
        if state.now_s - self._enough_since_s < self._calm_s(state):
            return state.num_present
        return self._enough[0][1] if self._enough else state.num_present

    def _grow(self, state: PoolState, target: ScalingTarget) -> ScalingDecision:
        if self.cooldown_left_s(state.now_s) > 0:
            why = f"{target.why}; but the last change was less than cooldown_s, {self._limits.cooldown_s:g} s, ago"
            return _nothing(state, why, target.numbers)
        num = min(target.num_wanted, self._limits.max_instances) - state.num_present
        return self._start(state, num, target.why, target.numbers)

    def _start(self, state: PoolState, num: int, why: str, numbers: Numbers) -> ScalingDecision:
        num = min(num, self._limits.step, self._num_starts_left(state))
        if num < 1:
            return _nothing(state, f"{why}; but starts_per_h {self._limits.starts_per_h} are used up", numbers)
        return ScalingDecision(kind=START, num=num, num_present=state.num_present, why=why, numbers=numbers)

    def _num_starts_left(self, state: PoolState) -> int:
        """Return the number of instances that may still be started within this hour."""
        while self._starts and self._starts[0] <= state.now_s - HOUR_S:
            self._starts.popleft()
        return max(0, self._limits.starts_per_h - len(self._starts))

    def _shrink(
        self, state: PoolState, target: ScalingTarget, ready: Sequence[str], num_needed: int
    ) -> ScalingDecision:
        maximum = self._limits.max_instances
        is_over = state.num_present > maximum
        if not is_over and (not self._limits.shrink or state.num_starting):
            return _nothing(state, target.why, target.numbers)
        if state.tiers is not None and not is_over:
            ready = [name for name in ready if name in state.tiers.idle]
        num_needed = min(num_needed, maximum)
        num = min(state.num_present - num_needed, self._limits.step, len(ready))
        costs = self._history.removal_costs(state.now_s, ready)
        chosen = instances_to_drain(ready, costs, num)
        if not chosen:
            return _nothing(state, target.why, target.numbers)
        why = f"more instances than max_instances {maximum}" if is_over else f"{num_needed} are enough: {target.why}"
        numbers = {
            **target.numbers,
            "missed_s": sum(costs[name][0] for name in chosen),
            "left_s": sum(costs[name][1] for name in chosen),
        }
        return ScalingDecision(kind=DRAIN, instance_ids=chosen, num_present=state.num_present, why=why, numbers=numbers)


def instances_to_drain(
    instance_ids: Sequence[str], costs: Mapping[str, tuple[float, float]], num: int
) -> tuple[str, ...]:
    """Choose the instances with the lowest costs of removal: added latency, then remaining time, then the id."""
    unknown = (0.0, 0.0)
    order = sorted(instance_ids, key=lambda name: (*costs.get(name, unknown), name))
    return tuple(order[:num])


def _nothing(state: PoolState, why: str, numbers: Numbers) -> ScalingDecision:
    return ScalingDecision(kind=NOTHING, num_present=state.num_present, why=why, numbers=numbers)
