"""Sizing: the smallest cluster, by policy, that meets latency targets under given traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.assembly import simulate
from simulator.goodput import GoodputGoal, GoodputTrial, run_trial
from simulator.metrics import Latencies, latencies, percentile_of_all
from simulator.parallel import Runner
from simulator.scenario import Scenario

FAR = 5.0  # times the share that may miss: runs in which more miss are stopped
NOTHING = 1e-9  # a share that may miss is never 0 in a ratio
TUNING_SEED = 1000  # parameters are tuned on other samples of traffic than those that evaluate them

# The parameters to try, by policy.
GRIDS: Mapping[str, Sequence[str]] = {
    "linear": tuple(f"linear: lambda = {value}" for value in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)),
    "dynamo": tuple(f"dynamo: lambda = {value}" for value in (0.2, 0.5, 0.8)),
    "filter": tuple(f"filter: range = {value}" for value in (2, 4, 8, 16, 32)),
    "jsq": tuple(f"jsq: waiting_weight = {value}" for value in (1.0, 4.0, 16.0)),
    "marginal": tuple(f"marginal: lambda = {value}" for value in (0.02, 0.05, 0.1)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRun:
    """One run of a cluster of some size."""

    scenario: Scenario
    policy: str
    rate: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Limits for a percentile of each latency; None for no limit."""

    percentile: float = 99.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        """Reject a target without a limit."""
        if self.ttft_s is None and self.tpot_s is None and self.e2e_s is None:
            raise ValueError("slo: give a limit for TTFT, TPOT or e2e")
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile: must be above 0 and at most 100, not {self.percentile}")

    @property
    def text(self) -> str:
        """What has to be met."""
        limits = {name.upper(): getattr(self, f"{name}_s") for name in ("ttft", "tpot", "e2e")}
        listed = ", ".join(f"{name} < {limit:g} s" for name, limit in limits.items() if limit is not None)
        return f"P{self.percentile:g} {listed}"

    def used_by(self, run: SizingRun) -> float:
        """Simulate; return the largest ratio of a percentile to its limit: at most 1 meets the target."""
        scenario = run.scenario
        work = scenario.workload(run.rate, run.seed)
        result = simulate(scenario.instance_specs(), work, run.policy, scenario.conditions, seed=run.seed)
        return self.share_used(latencies(result))

    def share_used(self, took: Latencies) -> float:
        """Return the largest ratio of a percentile to its limit."""
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
class AttainmentTarget:
    """A share of the requests, or of their tokens, that must have all tokens by their deadlines."""

    goal: GoodputGoal = field(default_factory=GoodputGoal)

    @property
    def text(self) -> str:
        """What has to be met."""
        of = "of the tokens in requests" if self.goal.by_work else "of the requests"
        return f"{100 * self.goal.share:g} % {of} with all tokens by their deadlines"

    def used_by(self, run: SizingRun) -> float:
        """Simulate; return the ratio of the share that misses to the share that may: at most 1 meets the target.

        A run that is far from that is stopped, and more would miss than it returns.
        """
        far = max(self.goal.share / 2, 1 - FAR * (1 - self.goal.share))
        trial = GoodputTrial(
            scenario=run.scenario, policy=run.policy, rate=run.rate, seed=run.seed, share=far, by_work=self.goal.by_work
        )
        missed = 1 - run_trial(trial)[self.goal.name]
        return float((missed + NOTHING) / (1 - self.goal.share + NOTHING))


SizingTarget = Target | AttainmentTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """One run that shows whether a cluster meets a target."""

    scenario: Scenario
    policy: str
    num_instances: int
    rate: float | None
    seed: int
    target: SizingTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The smallest cluster that meets the target, and the share of the limit that is used there and with one less.

    If `num_instances` is None, not even the largest cluster that was tried meets it.
    """

    policy: str
    num_instances: int | None
    used: float
    used_with_one_less: float | None


def share_used(request: SizingRequest) -> float:
    """Simulate a cluster; return the share of the limit that it uses: at most 1 meets the target."""
    scenario = sized(request.scenario, request.num_instances)
    run = SizingRun(scenario=scenario, policy=request.policy, rate=request.rate, seed=request.seed)
    return request.target.used_by(run)


def sized(scenario: Scenario, num_instances: int) -> Scenario:
    """Return a scenario with another number of instances."""
    if len(scenario.instances) > 1:
        raise ValueError("instances: a cluster of several kinds cannot be sized; give one kind")
    return scenario.changed(instances={"count": num_instances})


def recommend(
    scenario: Scenario, policies: Sequence[str], target: SizingTarget, *, rate: float | None, seeds: int,
    max_instances: int, runner: Runner, on_progress: Callable[[str], None],
) -> list[Recommendation]:  # fmt: skip
    """Find the smallest cluster for each policy, with its parameters tuned at that size; the best policy first."""
    sized(scenario, 1)

    def used(policy: str, num: int, first_seed: int = 0) -> float:
        requests = [
            SizingRequest(
                scenario=scenario, policy=policy, num_instances=num, rate=rate, seed=first_seed + seed, target=target
            )
            for seed in range(seeds)
        ]
        return max(value for _, value in runner(share_used, requests))

    recommendations = []
    start = 1
    for policy in policies:
        on_progress(policy)
        recommendation = _smallest(policy, used, start, max_instances)
        grid = GRIDS.get(policy, ())
        if grid and recommendation.num_instances is not None:
            tight = max(1, recommendation.num_instances - 1)
            on_progress(f"{policy}: tuning parameters")
            best = min(grid, key=lambda one: used(one, tight, TUNING_SEED))
            tuned = _smallest(best, used, tight, max_instances)
            recommendation = min((tuned, recommendation), key=_rank)
        recommendations.append(recommendation)
        start = recommendation.num_instances or start
    return sorted(recommendations, key=_rank)


def _rank(recommendation: Recommendation) -> tuple[bool, int, float, str]:
    return (
        recommendation.num_instances is None,
        recommendation.num_instances or 0,
        recommendation.used,
        recommendation.policy,
    )


def _smallest(policy: str, used: Callable[[str, int], float], start: int, max_instances: int) -> Recommendation:
    known: dict[int, float] = {}

    def share(num: int) -> float:
        if num not in known:
            known[num] = used(policy, num)
        return known[num]

    num = smallest_size(share, start, max_instances)
    if num is None:
        return Recommendation(policy=policy, num_instances=None, used=share(max_instances), used_with_one_less=None)
    less = share(num - 1) if num > 1 else None
    return Recommendation(policy=policy, num_instances=num, used=share(num), used_with_one_less=less)


def smallest_size(share: Callable[[int], float], start: int, most: int, least: int = 1) -> int | None:
    """Find the smallest number whose share of the limit is at most 1; None if not even that of `most` is.

    The search goes from a first guess in growing strides, then by bisection. A number may be asked for several times.
    """
    num, stride = max(least, min(start, most)), 1
    if share(num) <= 1:
        high = num
        while num > least and share(num) <= 1:
            high, num, stride = num, max(least, num - stride), stride * 2
        if share(num) <= 1:
            return num
        low = num
    else:
        low = num
        while share(num) > 1 and num < most:
            low, num, stride = num, min(most, num + stride), stride * 2
        if share(num) > 1:
            return None
        high = num
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) <= 1 else (middle, high)
    return high
