"""A cluster of a few lines: requests of a known pace, placed where the fewest are; instances come late and leave in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from scheduler.provisioning.limits import Aims, ScalingLimits
from scheduler.provisioning.observed import Observed, Placed
from scheduler.provisioning.planner import DRAIN, START, Planner
from scheduler.provisioning.pool_state import Rule

TOKENS = 200
PACE_S, DRAG_S = 0.02, 0.0005
SEATS = 40


@dataclass(slots=True)
class World:
    """What happened: (time, instances present) at each change, and all latencies."""

    rule: Rule
    aims: Aims
    limits: ScalingLimits
    rate: Callable[[float], float]
    cold_start_s: float = 60.0
    first: int = 1
    seed: int = 0
    changes: list[tuple[float, int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    instance_s: float = 0.0

    def run(self, seconds: int) -> None:
        """Let time pass."""
        draws = np.random.default_rng(self.seed)
        observed = Observed(self.aims, self.limits)
        planner = Planner(self.rule, self.limits, observed)
        there: dict[str, list[tuple[float, str, float]]] = {f"i{number}": [] for number in range(self.first)}
        starting: list[tuple[float, str]] = []
        leaving: set[str] = set()
        number, named = 0, self.first
        for second in range(seconds):
            now_s = float(second)
            for ready_s, name in [one for one in starting if one[0] <= now_s]:
                starting.remove((ready_s, name))
                there[name] = []
                observed.cold_starts.measured(self.cold_start_s)
            for name, queue in list(there.items()):
                for end in [one for one in queue if one[0] <= now_s]:
                    queue.remove(end)
                    observed.ended(now_s, end[1], end[2])
                if name in leaving and not queue:
                    leaving.remove(name)
                    del there[name]
            ready = sorted(set(there) - leaving)
            for _ in range(draws.poisson(self.rate(now_s))):
                if not ready:
                    continue
                order = sorted(ready, key=lambda name: (len(there[name]), name))
                e2e_s, next_s = (self._e2e(len(there[name]), draws) for name in (order * 2)[:2])
                placed = Placed(
                    request_id=str(number), instance_id=order[0], prompt_tokens=100, output_tokens=TOKENS,
                    e2e_s=e2e_s, next_best_e2e_s=next_s,
                )  # fmt: skip
                observed.placed(now_s, placed)
                there[order[0]].append((now_s + e2e_s, str(number), e2e_s))
                self.latencies.append(e2e_s)
                number += 1
            decision = planner.plan(now_s, ready, len(starting))
            if decision.kind == START:
                for _ in range(decision.num):
                    starting.append((now_s + self.cold_start_s, f"i{named}"))
                    named += 1
            elif decision.kind == DRAIN:
                leaving.update(decision.instance_ids)
            num = len(there) - len(leaving) + len(starting)
            if decision.kind in (START, DRAIN):
                planner.done(now_s, decision)
                self.changes.append((now_s, num))
            self.counts.append(num)
            self.instance_s += len(there) + len(starting)

    def _e2e(self, company: int, draws: np.random.Generator) -> float:
        """Decode in company, after those that wait in front."""
        alone_s = TOKENS * (PACE_S + DRAG_S * min(company + 1, SEATS))
        turns = max(0, company + 1 - SEATS) / SEATS
        return alone_s * (1 + turns) * draws.uniform(0.9, 1.1)


def bears(share: float) -> float:
    """What an instance of such a world serves with so many of its seats taken."""
    company = SEATS * share
    return company / (TOKENS * (PACE_S + DRAG_S * company))


def needed(rate: float, share: float) -> int:
    """How many instances a rate takes."""
    return math.ceil(rate / bears(share))
