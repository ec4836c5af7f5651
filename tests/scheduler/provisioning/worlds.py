"""A small model of a pool with cold starts: requests go to the least loaded instance, at a known token time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from scheduler.provisioning.history import PlacedRequest, PoolHistory
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from scheduler.provisioning.planner import DRAIN, START, Planner
from scheduler.provisioning.pool_state import Rule

TOKENS = 200
TOKEN_S, SLOWDOWN_S = 0.02, 0.0005
SEATS = 40


@dataclass(slots=True)
class World:
    """A pool, and its record: (time, instances) at each change, instances at each second, and all latencies."""

    rule: Rule
    objectives: ScalingObjectives
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
        """Run for a time."""
        rng = np.random.default_rng(self.seed)
        history = PoolHistory(self.objectives, self.limits)
        planner = Planner(self.rule, self.limits, history)
        requests_on: dict[str, list[tuple[float, str, float]]] = {f"i{number}": [] for number in range(self.first)}
        starting: list[tuple[float, str]] = []
        leaving: set[str] = set()
        number, named = 0, self.first
        for second in range(seconds):
            now_s = float(second)
            for ready_s, name in [one for one in starting if one[0] <= now_s]:
                starting.remove((ready_s, name))
                requests_on[name] = []
                history.cold_starts.measured(self.cold_start_s)
            for name, queue in list(requests_on.items()):
                for end in [one for one in queue if one[0] <= now_s]:
                    queue.remove(end)
                    history.add_end(now_s, end[1], end[2])
                if name in leaving and not queue:
                    leaving.remove(name)
                    del requests_on[name]
            ready = sorted(set(requests_on) - leaving)
            for _ in range(rng.poisson(self.rate(now_s))):
                if not ready:
                    continue
                order = sorted(ready, key=lambda name: (len(requests_on[name]), name))
                e2e_s, next_s = (self._e2e(len(requests_on[name]), rng) for name in (order * 2)[:2])
                placed = PlacedRequest(
                    request_id=str(number), instance_id=order[0], prompt_tokens=100, output_tokens=TOKENS,
                    e2e_s=e2e_s, next_best_e2e_s=next_s,
                )  # fmt: skip
                history.add_placement(now_s, placed)
                requests_on[order[0]].append((now_s + e2e_s, str(number), e2e_s))
                self.latencies.append(e2e_s)
                number += 1
            decision = planner.plan(now_s, ready, len(starting))
            if decision.kind == START:
                for _ in range(decision.num):
                    starting.append((now_s + self.cold_start_s, f"i{named}"))
                    named += 1
            elif decision.kind == DRAIN:
                leaving.update(decision.instance_ids)
            num = len(requests_on) - len(leaving) + len(starting)
            if decision.kind in (START, DRAIN):
                planner.applied(now_s, decision)
                self.changes.append((now_s, num))
            self.counts.append(num)
            self.instance_s += len(requests_on) + len(starting)

    def _e2e(self, num_before: int, rng: np.random.Generator) -> float:
        """Return the latency of a request, given the requests before it."""
        decode_s = TOKENS * (TOKEN_S + SLOWDOWN_S * min(num_before + 1, SEATS))
        turns = max(0, num_before + 1 - SEATS) / SEATS
        return decode_s * (1 + turns) * rng.uniform(0.9, 1.1)


def throughput(share: float) -> float:
    """Return the throughput of an instance with a share of its seats taken."""
    concurrency = SEATS * share
    return concurrency / (TOKENS * (TOKEN_S + SLOWDOWN_S * concurrency))


def needed(rate: float, share: float) -> int:
    """Return the number of instances that a rate needs."""
    return math.ceil(rate / throughput(share))
