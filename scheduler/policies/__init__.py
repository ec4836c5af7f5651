"""The rules that choose an instance, one per file, in one table.

A policy scores the instances that a request could go to: the lowest score wins, equals by instance id. Parameters,
and what a rule remembers between requests, live in the closure that makes it. A seeded generator is handed in.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.instances import InstanceView
from scheduler.policies import block, random, round_robin

Policy = Callable[[Sequence[InstanceView]], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """One line of the table: how to make the policy, its formula, its source, and whether it needs forecasts."""

    make: Callable[[np.random.Generator], Policy]
    formula: str
    source: str
    needs_forecast: bool = False


POLICIES = {
    "block": PolicyEntry(
        make=lambda _: block.lowest_e2e, formula="min predicted e2e", source="Block §4.2, §5", needs_forecast=True
    ),
    "random": PolicyEntry(make=random.uniform, formula="uniform", source="Block §5"),
    "round_robin": PolicyEntry(make=lambda _: round_robin.in_turn(), formula="each in turn", source="Block §5"),
}


def policy_named(name: str) -> PolicyEntry:
    """Look a policy up; an unknown name is refused with the nearest known one."""
    if name in POLICIES:
        return POLICIES[name]
    near = difflib.get_close_matches(name, POLICIES, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"policy: {name!r} is none of {', '.join(POLICIES)}{hint}")
