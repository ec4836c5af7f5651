"""From a rule's wish to what is done: within limits, not too fast, and not up and down."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.provisioning.leaving import leavers
from scheduler.provisioning.limits import HOUR_S, ScalingLimits
from scheduler.provisioning.observed import Observed
from scheduler.provisioning.pool_state import Numbers, PoolState, Rule, ScalingTarget

START, DRAIN, NOTHING = "start", "drain", "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now: start so many, let named ones go, or nothing; and why."""

    kind: str
    num: int = 0
    instance_ids: tuple[str, ...] = ()
    num_present: int = 0
    why: str = ""
    numbers: Numbers = field(default_factory=dict)

    @property
    def num_desired(self) -> int:
        """How many there are when it is done."""
        return self.num_present + (self.num if self.kind == START else -len(self.instance_ids))


class Planner:
    """Plans for one pool. `plan` only says; `done` is to be called for what is really begun."""

    def __init__(self, rule: Rule, limits: ScalingLimits, observed: Observed) -> None:
        """Have changed nothing yet."""
        self._rule, self._limits, self._observed = rule, limits, observed
        self._enough: deque[tuple[float, int]] = deque()  # falling: how many were needed, while calm counts
        self._seen_since_s = math.nan
        self._last_change_s = -math.inf
        self._starts: deque[float] = deque()  # of the last hour

    def cooldown_left_s(self, now_s: float) -> float:
        """Tell how long nothing more will be started."""
        return max(0.0, self._last_change_s + self._limits.cooldown_s - now_s)

    def plan(
        self, now_s: float, ready: Sequence[str], num_starting: int, *, unix_s: float = 0.0, rule: Rule | None = None
    ) -> Decision:
        """Say what is to be done."""
        now = self._observed.situation(
            now_s, num_ready=len(ready), num_starting=num_starting, ready_in_s=self._ready_in_s(now_s, num_starting),
            unix_s=unix_s,
        )  # fmt: skip
        wish = (rule or self._rule)(now)
        if rule is None:
            self._note(now, wish)
        least, most = self._limits.min_instances, self._limits.max_instances
        if now.num_present < least:
            return self._start(now, least - now.num_present, f"there are to be at least {least}", wish.numbers)
        if min(wish.num_wanted, most) > now.num_present:
            return self._grow(now, wish)
        fewest = max(least, wish.num_enough if rule is not None else self._most_needed(now))
        if now.num_present > max(fewest, 0) or now.num_present > most:
            return self._shrink(now, wish, ready, max(fewest, 0))
        return _nothing(now, wish.why, wish.numbers)

    def done(self, now_s: float, decision: Decision) -> None:
        """Note that a plan was begun."""
        self._last_change_s = now_s
        self._enough.clear()
        self._seen_since_s = now_s
        self._starts.extend([now_s] * decision.num)
        self._observed.changed()

    # Within.

    def _note(self, now: PoolState, wish: ScalingTarget) -> None:
        if math.isnan(self._seen_since_s):
            self._seen_since_s = now.now_s
        while self._enough and self._enough[-1][1] <= wish.num_enough:
            self._enough.pop()
        self._enough.append((now.now_s, wish.num_enough))
        calm_s = self._calm_s(now)
        while self._enough[0][0] < now.now_s and self._enough[0][0] <= now.now_s - calm_s:
            self._enough.popleft()

    def _ready_in_s(self, now_s: float, num_starting: int) -> tuple[float, ...]:
        """Tell when the latest ones, which are those that still start, should be there."""
        expected_s = self._observed.cold_starts.expected_s
        latest = list(self._starts)[-num_starting:] if num_starting else []
        return tuple(max(0.0, start_s + expected_s - now_s) for start_s in latest)

    def _calm_s(self, now: PoolState) -> float:
        """Wait the longer before one goes, the longer it takes to get it back."""
        return max(self._limits.calm_s, now.cold_start_s)

    def _most_needed(self, now: PoolState) -> int:
        """Tell the most that were needed while calm counts; as many as there are before that has passed."""
        if now.now_s - self._seen_since_s < self._calm_s(now):
            return now.num_present
        return self._enough[0][1] if self._enough else now.num_present

    def _grow(self, now: PoolState, wish: ScalingTarget) -> Decision:
        left_s = self.cooldown_left_s(now.now_s)
        if left_s > 0:
            return _nothing(now, f"{wish.why}; but the last change was less than {self._limits.cooldown_s:g} s ago",
                            wish.numbers)  # fmt: skip
        num = min(wish.num_wanted, self._limits.max_instances) - now.num_present
        return self._start(now, num, wish.why, wish.numbers)

    def _start(self, now: PoolState, num: int, why: str, numbers: Numbers) -> Decision:
        num = min(num, self._limits.step, self._affordable(now))
        if num < 1:
            return _nothing(now, f"{why}; but starts_per_h are used up", numbers)
        return Decision(kind=START, num=num, num_present=now.num_present, why=why, numbers=numbers)

    def _affordable(self, now: PoolState) -> int:
        """Tell how many more may be started within this hour."""
        while self._starts and self._starts[0] <= now.now_s - HOUR_S:
            self._starts.popleft()
        return max(0, self._limits.starts_per_h - len(self._starts))

    def _shrink(self, now: PoolState, wish: ScalingTarget, ready: Sequence[str], fewest: int) -> Decision:
        over = now.num_present > self._limits.max_instances
        if not over and (not self._limits.shrink or now.num_starting):
            return _nothing(now, wish.why, wish.numbers)
        fewest = min(fewest, self._limits.max_instances)
        num = min(now.num_present - fewest, self._limits.step, len(ready))
        losses = self._observed.losses(now.now_s, ready)
        chosen = leavers(ready, losses, num)
        if not chosen:
            return _nothing(now, wish.why, wish.numbers)
        why = f"more than max_instances {self._limits.max_instances}" if over else f"{fewest} are enough: {wish.why}"
        numbers = {**wish.numbers, "missed_s": sum(losses[name][0] for name in chosen),
                   "left_s": sum(losses[name][1] for name in chosen)}  # fmt: skip
        return Decision(kind=DRAIN, instance_ids=chosen, num_present=now.num_present, why=why, numbers=numbers)


def _nothing(now: PoolState, why: str, numbers: Numbers) -> Decision:
    return Decision(kind=NOTHING, num_present=now.num_present, why=why, numbers=numbers)
