"""Which policy, with which parameters, and how many instances are enough for given traffic and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.assembly import simulate
from simulator.metrics import Latencies, latencies, percentile_of_all
from simulator.parallel import Runner
from simulator.scenario import Scenario

TUNING_SEED = 1000  # parameters are tuned on other samples of traffic than those that show how good they are

# What is tried of policies that have parameters.
GRIDS: Mapping[str, Sequence[str]] = {
    "linear": tuple(f"linear: lambda = {value}" for value in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)),
    "dynamo": tuple(f"dynamo: lambda = {value}" for value in (0.2, 0.5, 0.8)),
    "filter": tuple(f"filter: range = {value}" for value in (2, 4, 8, 16, 32)),
    "jsq": tuple(f"jsq: waiting_weight = {value}" for value in (1.0, 4.0, 16.0)),
    "marginal": tuple(f"marginal: lambda = {value}" for value in (0.02, 0.05, 0.1)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A percentile of each latency is to stay below its limit; None where it does not matter."""

    percentile: float = 99.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse targets that ask for nothing."""
        if self.ttft_s is None and self.tpot_s is None and self.e2e_s is None:
            raise ValueError("slo: name a limit for TTFT, TPOT or e2e")
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile: must lie above 0 and at most at 100, not {self.percentile}")

    def missed_by(self, took: Latencies) -> float:
        """How many times its limit the worst percentile is."""
        ratios: list[float] = []
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            limit_s = getattr(self, name)
            if limit_s is not None:
                values = getattr(took, name)
                if name == "tpot_s":
                    values = np.where(np.isnan(values) & ~np.isnan(took.e2e_s), 0.0, values)
                ratios.append(percentile_of_all(values, self.percentile) / limit_s)
        return max(ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """One run, to see whether a cluster would hold."""

    scenario: Scenario
    policy: str
    num_instances: int
    rate: float | None
    seed: int
    target: Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The smallest cluster with which a policy holds; the shares of its limit that are used there, and with one less.

    Without `num_instances` not even the largest cluster that was tried is enough.
    """

    policy: str
    num_instances: int | None
    used: float
    used_with_one_less: float | None


def share_used(question: SizingRequest) -> float:
    """Simulate; return the worst percentile over its limit: up to 1 is good."""
    scenario = sized(question.scenario, question.num_instances)
    work = scenario.workload(question.rate, question.seed)
    result = simulate(scenario.units(), work, question.policy, scenario.conditions, seed=question.seed)
    return question.target.missed_by(latencies(result))


def sized(scenario: Scenario, num_instances: int) -> Scenario:
    """Change how many instances there are of the only kind."""
    if len(scenario.instances) > 1:
        raise ValueError("instances: a cluster of several kinds cannot be sized: name one kind")
    return scenario.changed(instances={"count": num_instances})


def recommend(
    scenario: Scenario, policies: Sequence[str], target: Target, *, rate: float | None, seeds: int, most: int,
    runner: Runner, told: Callable[[str], None],
) -> list[Recommendation]:  # fmt: skip
    """Find for each policy the smallest cluster, its parameters tuned at that size; best first."""
    sized(scenario, 1)

    def used(policy: str, num: int, first_seed: int = 0) -> float:
        asked = [
            SizingRequest(
                scenario=scenario, policy=policy, num_instances=num, rate=rate, seed=first_seed + seed, target=target
            )
            for seed in range(seeds)
        ]
        return max(value for _, value in runner(share_used, asked))

    answers = []
    start = 1
    for policy in policies:
        told(policy)
        answer = _smallest(policy, used, start, most)
        grid = GRIDS.get(policy, ())
        if grid and answer.num_instances is not None:
            tight = max(1, answer.num_instances - 1)
            told(f"{policy}, its parameters")
            best = min(grid, key=lambda one: used(one, tight, TUNING_SEED))
            tuned = _smallest(best, used, tight, most)
            answer = min((tuned, answer), key=_rank)
        answers.append(answer)
        start = answer.num_instances or start
    return sorted(answers, key=_rank)


def _rank(answer: Recommendation) -> tuple[bool, int, float, str]:
    return answer.num_instances is None, answer.num_instances or 0, answer.used, answer.policy


def _smallest(policy: str, used: Callable[[str, int], float], start: int, most: int) -> Recommendation:
    """Go out from a first guess in growing strides, then bisect."""
    known: dict[int, float] = {}

    def share(num: int) -> float:
        if num not in known:
            known[num] = used(policy, num)
        return known[num]

    num, stride = min(start, most), 1
    if share(num) <= 1:
        high = num
        while num > 1 and share(num) <= 1:
            high, num, stride = num, max(1, num - stride), stride * 2
        low = 0 if share(num) <= 1 else num
        high = num if low == 0 else high
    else:
        while share(num) > 1 and num < most:
            num, stride = min(most, num + stride), stride * 2
        if share(num) > 1:
            return Recommendation(policy=policy, num_instances=None, used=share(num), used_with_one_less=None)
        low, high = max(one for one, value in known.items() if value > 1), num
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) <= 1 else (middle, high)
    less = share(high - 1) if high > 1 else None
    return Recommendation(policy=policy, num_instances=high, used=share(high), used_with_one_less=less)
