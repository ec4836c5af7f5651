"""`block recommend --mix`: what serving by deadlines costs, with a fixed number of instances and with autoscaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scheduler.policy import policy_from
from scheduler.provisioning import TIERS, rule_from
from scheduler.provisioning.limits import ScalingObjectives
from scheduler.provisioning.tiers import Tiers
from services.cli.group_table import group_table
from services.cli.slo_bound_lines import bound_of
from simulator.goodput import GoodputGoal
from simulator.parallel import Runner
from simulator.pools import PoolRecommendation, in_pools
from simulator.scenario import Scenario
from simulator.serving_cost import CostTrial, mean_cost
from simulator.sizing import Recommendation, sized

BY_DEADLINES = "slo,polyserve,gorouting,minimal,block,jsq"
FIXED, AUTOSCALED = "fixed", "autoscaled"

Ranking = Sequence[tuple[str, Recommendation]]  # profiles and what is recommended there


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedCosts:
    """The costs of each row of a ranking, and the least ones by profile; None where they are not known."""

    names: Sequence[str]  # of the rows
    rows: Sequence[Mapping[str, Mapping[str, Any] | None]]
    least: Mapping[str, Mapping[str, float | None] | None]
    rule: str | None

    def added_to(self, total: Mapping[str, Any]) -> dict[str, Any]:
        """Add the costs to a ranking for a program."""
        ranking = [{**row, "cost": cost} for row, cost in zip(total["ranking"], self.rows, strict=True)]
        return {**total, "ranking": ranking, "bound": self.least}

    def lines(self) -> Iterator[str]:
        """Yield the costs for people, and what each group of a mix attains at them."""
        names = {FIXED: "with a fixed number of instances", AUTOSCALED: f"with {self.rule}"}
        for name, costs in zip(self.names, self.rows, strict=True):
            for kind, cost in costs.items():
                if cost is not None:
                    serving = ""
                    if cost["serving_s_per_request"] != cost["instance_s_per_request"]:
                        serving = f" ({cost['serving_s_per_request']:.3f} in tiers)"
                    yield (
                        f"{name}: {cost['instance_s_per_request']:.3f}"
                        f" instance-seconds per request{serving} {names[kind]}, attained {cost['attained']:.1%}"
                        f" ({cost['attained_tokens']:.1%} of the tokens)"
                    )
        reports = {
            f"{name} {self.rule}" if kind == AUTOSCALED else name: cost
            for name, costs in zip(self.names, self.rows, strict=True)
            for kind, cost in costs.items()
            if cost is not None
        }
        yield from group_table("requests of each group with all tokens by their deadlines", reports)
        for profile, least in self.least.items():
            if least is not None:
                yield f"{profile}: {_least_text(least)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostMeasure:
    """How costs are measured: at a rate, with samples of traffic, and with a rule where there is one."""

    rate: float | None
    seeds: int
    rule: str | None
    cold_start_s: float
    tiers: Tiers
    goal: GoodputGoal
    on_progress: Callable[[str], None]

    def __post_init__(self) -> None:
        """Reject an unknown rule before anything is measured."""
        longest_s = ScalingObjectives().horizon_s
        if not 0 <= self.cold_start_s <= longest_s:
            raise ValueError(f"cold_start_s: must be a time from 0 to {longest_s:g}, not {self.cold_start_s}")
        if self.rule is not None:
            if (TIERS in self.rule.split("+")) != bool(self.tiers):
                raise ValueError("autoscale: the rule tiers, and no other, needs --tiers FILE")
            try:
                rule_from(self.rule, ScalingObjectives())
            except ValueError as error:
                raise ValueError(f"autoscale: {error}") from None

    def costs(self, scenarios: Mapping[str, Scenario], ranking: Ranking, runner: Runner) -> RecommendedCosts:
        """Return the costs of a ranking; `scenarios` are by profile."""
        several = len(scenarios) > 1
        return RecommendedCosts(
            names=[f"{profile}  {answer.policy}" if several else answer.policy for profile, answer in ranking],
            rows=[
                self._of_cluster(scenarios[profile], answer.policy, answer.num_instances, runner)
                for profile, answer in ranking
            ],
            least={profile: self._least(sized(scenario, 1)) for profile, scenario in scenarios.items()},
            rule=self.rule,
        )

    def costs_of_pools(
        self, scenario: Scenario, found: Sequence[PoolRecommendation], runner: Runner
    ) -> RecommendedCosts:
        """Return the costs of recommended pools and co-located instances."""
        rows = []
        for one in found:
            pools = scenario if one.best is None else in_pools(scenario, one.best.num_prefill, one.best.num_decode)
            rows.append(self._of_cluster(pools, one.policy, one.num_instances, runner))
        return RecommendedCosts(
            names=[f"{one.policy} {'co-located' if one.colocated else 'pools'}" for one in found],
            rows=rows,
            least={scenario.instances[0].profile: self._least(in_pools(scenario, 1, 1))},
            rule=self.rule,
        )

    def _of_cluster(
        self, scenario: Scenario, policy: str, num: int | None, runner: Runner
    ) -> dict[str, Mapping[str, Any] | None]:
        if num is None:
            return {FIXED: None, AUTOSCALED: None}
        self.on_progress(f"{policy}: cost")
        trial = CostTrial(scenario=scenario, policy=policy, num_instances=num, rate=self.rate, seed=0)
        autoscaled = None
        if self.rule is not None and policy_from(policy).needs_forecast:  # which rules read
            scaled = replace(trial, rule=self.rule, cold_start_s=self.cold_start_s, tiers=self.tiers)
            autoscaled = mean_cost(scaled, self.seeds, runner)
        return {FIXED: mean_cost(trial, self.seeds, runner), AUTOSCALED: autoscaled}

    def _least(self, scenario: Scenario) -> dict[str, float | None] | None:
        """Return the least instance-seconds per request, and instances; None where no bound is defined."""
        work = scenario.workload(self.rate, 0)
        bound = bound_of(scenario.instance_specs(), work)
        if bound is None:
            return None
        seconds = bound.instance_s(self.goal.share, by_work=self.goal.by_work)
        if math.isinf(seconds):
            return {"instance_s_per_request": None, "num_instances": None}
        span_s = float(work.arrival_s[-1] - work.arrival_s[0])
        offered = (len(work) - 1) / span_s if self.rate is None and span_s > 0 else self.rate or 0.0
        return {"instance_s_per_request": seconds, "num_instances": max(1, math.ceil(offered * seconds))}


def _least_text(least: Mapping[str, float | None]) -> str:
    if least["num_instances"] is None:
        return "no number of instances is enough: too many requests have deadlines that an idle one misses"
    return (
        f"at least {least['num_instances']:g} instances, {least['instance_s_per_request']:.3f} instance-seconds per"
        " request, by whatever policy"
    )
