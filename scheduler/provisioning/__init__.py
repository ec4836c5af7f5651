"""How many instances there should be: rules, one per file, and a planner that keeps them within limits.

Nothing here knows what time it is, or starts or sends anything: time is an argument, and what comes out are plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from scheduler.provisioning.headroom import headroom
from scheduler.provisioning.limits import Aims
from scheduler.provisioning.pool_state import PoolState, Rule, ScalingTarget
from scheduler.provisioning.preempt import preempt
from scheduler.provisioning.relief import relief
from scheduler.provisioning.schedule import peaks_from, schedule

RULES: Mapping[str, Callable[[Aims], Rule]] = {"headroom": headroom, "preempt": preempt, "relief": relief}
SCHEDULE = "schedule"  # made of what was written down
RULE_NAMES = (*RULES, SCHEDULE)


def rule_from(text: str, aims: Aims, peaks: str = "") -> Rule:
    """Make a rule by its name; of several, joined by +, the one that wants the most wins."""
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in RULE_NAMES:
            raise ValueError(f"rule: {name!r} is none of {', '.join(RULE_NAMES)}")
    if (SCHEDULE in names) != bool(peaks):
        raise ValueError("schedule: belongs to the rule schedule, which cannot do without it")
    rules = [schedule(aims, peaks_from(peaks)) if name == SCHEDULE else RULES[name](aims) for name in names]
    return rules[0] if len(rules) == 1 else _largest(rules)


def _largest(rules: Sequence[Rule]) -> Rule:
    def rule(now: PoolState) -> ScalingTarget:
        wishes = [one(now) for one in rules]
        first = max(wishes, key=lambda wish: wish.num_wanted)
        return ScalingTarget(
            num_wanted=first.num_wanted,
            num_enough=max(wish.num_enough for wish in wishes),
            why=first.why,
            numbers={name: value for wish in wishes for name, value in wish.numbers.items()},
        )

    return rule
