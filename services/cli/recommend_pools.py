"""`block recommend --pools`: sizes of prefill and decode pools, or of co-located instances, and their cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.cli.recommend_costs import CostMeasure
from simulator.parallel import Runner
from simulator.pools import PoolRecommendation, recommend_pools
from simulator.scenario import Scenario
from simulator.sizing import SizingTarget

COLOCATED, POOLS = ("block", "jsq"), ("block", "pd_least")
SMALLEST = 2  # one instance in each pool
POOLS_ONLY = "pd_"  # policies whose names begin with this always need two pools


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCosts:
    """What a cluster costs per hour, and for a million tokens of prompts and responses."""

    instance_per_hour: float
    tokens_per_s: float

    def of(self, num_instances: int) -> dict[str, float]:
        """Return the costs of so many instances."""
        per_hour = num_instances * self.instance_per_hour
        return {"cost_per_hour": per_hour, "cost_per_million_tokens": per_hour / (3600 * self.tokens_per_s) * 1e6}


def recommend_by_pools(
    scenario: Scenario, policies: Sequence[str], target: SizingTarget, *, rate: float | None, seeds: int,
    max_instances: int, price: float, measure: CostMeasure | None, runner: Runner, as_json: bool,
) -> None:  # fmt: skip
    """Find and print the smallest cluster of each policy, with `measure` also its instance-seconds and the bound."""
    if not price > 0:
        raise ValueError(f"instance_price: must be above 0, not {price}")
    if max_instances < SMALLEST:
        raise ValueError(f"max_instances: must be at least {SMALLEST} with --pools, not {max_instances}")
    work = scenario.workload(rate, 0)
    span_s = float(work.arrival_s[-1] - work.arrival_s[0])
    tokens = int((work.lengths.prompt_tokens + work.lengths.output_tokens).sum())
    costs = PoolCosts(instance_per_hour=price, tokens_per_s=tokens / max(span_s, 1e-9))
    colocated = [one for one in policies or COLOCATED if not one.startswith(POOLS_ONLY)]
    found = list(
        recommend_pools(
            scenario, colocated, list(policies or POOLS), target, rate=rate, seeds=seeds, max_instances=max_instances,
            runner=runner, on_progress=_show,
        )
    )  # fmt: skip
    found.sort(key=lambda one: (one.num_instances is None, one.num_instances or 0))
    measured = None if measure is None else measure.costs_of_pools(scenario, found, runner)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if as_json:
        total = {"target": asdict(target), "seeds": seeds, "ranking": [_row(one, costs) for one in found]}
        print(json.dumps(total if measured is None else measured.added_to(total)))
        return
    _print_table(found, target, costs)
    if measured is not None:
        print("\n".join(measured.lines()))


def _row(one: PoolRecommendation, costs: PoolCosts) -> dict[str, Any]:
    """Return a recommendation for a program; `tried` has the points of a map over both numbers of instances."""
    row = {"policy": one.policy, "colocated": one.colocated, "num_instances": one.num_instances}
    best = {} if one.best is None else {**asdict(one.best), **costs.of(one.num_instances or 0)}
    return {**row, **best, "tried": [asdict(tried) for tried in one.tried]}


def _show(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{what}\x1b[K", end="", file=sys.stderr)


def _print_table(found: Sequence[PoolRecommendation], target: SizingTarget, costs: PoolCosts) -> None:
    print(f"instances needed for {target.text}, the share of the limit used, and the cost")
    width = max(len(one.policy) for one in found)
    for one in found:
        if one.best is None:
            kind = "co-located" if one.colocated else "pools"
            print(f"{one.policy:{width}}  {kind}: never: {min(tried.used for tried in one.tried):.2f} times the limit")
            continue
        num = one.num_instances or 0
        kind = (
            f"{num} co-located" if one.colocated else f"{one.best.num_prefill} prefill + {one.best.num_decode} decode"
        )
        cost = costs.of(num)
        print(
            f"{one.policy:{width}}  {kind:22} {one.best.used:5.2f} {cost['cost_per_hour']:9.2f} an hour"
            f" {cost['cost_per_million_tokens']:8.4f} a million tokens"
        )
