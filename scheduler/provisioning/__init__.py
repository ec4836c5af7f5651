"""Decides the number of instances: rules, and a planner that applies limits to their targets.

Nothing here reads a clock or starts an instance: time is an argument, and the results are decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from predictor.suggestions import require_choice
from scheduler.provisioning.headroom import headroom
from scheduler.provisioning.limits import ScalingObjectives
from scheduler.provisioning.pool_state import PoolState, Rule, ScalingTarget
from scheduler.provisioning.schedule import parse_schedule, schedule
from scheduler.provisioning.threshold import preempt, relief
from scheduler.provisioning.tier_rule import tiers

TIERS = "tiers"  # the rule that also needs tiers
RULES: Mapping[str, Callable[[ScalingObjectives], Rule]] = {
    "headroom": headroom,
    "preempt": preempt,
    "relief": relief,
    TIERS: tiers,
}
SCHEDULE = "schedule"  # the rule that also needs a schedule
RULE_NAMES = (*RULES, SCHEDULE)


def rule_from(text: str, objectives: ScalingObjectives, schedule_text: str = "") -> Rule:
    """Make a rule by its name; of several, joined by +, the largest target counts."""
    names = [name.strip() for name in text.split("+")]
    for name in names:
        require_choice("rule", name, RULE_NAMES)
    if SCHEDULE in names and not schedule_text:
        raise ValueError("schedule: is missing; the rule schedule needs one")
    if schedule_text and SCHEDULE not in names:
        raise ValueError("schedule: is only for the rule schedule")
    rules = [
        schedule(objectives, parse_schedule(schedule_text)) if name == SCHEDULE else RULES[name](objectives)
        for name in names
    ]
    return rules[0] if len(rules) == 1 else _largest(rules)


def _largest(rules: Sequence[Rule]) -> Rule:
    def rule(state: PoolState) -> ScalingTarget:
        targets = [one(state) for one in rules]
        largest = max(targets, key=lambda target: target.num_wanted)
        return ScalingTarget(
            num_wanted=largest.num_wanted,
            num_enough=max(target.num_enough for target in targets),
            why=largest.why,
            numbers={name: value for target in targets for name, value in target.numbers.items()},
        )

    return rule
