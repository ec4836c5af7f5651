"""What serving a workload costs in instance-seconds: by a fixed number of instances, or by one that a rule changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from predictor.gain import attainment_report
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from scheduler.provisioning.tiers import Tiers
from simulator.assembly import simulate
from simulator.autoscaling import STATIC, AutoscalingOptions, simulate_provisioned
from simulator.goodput import attained_in
from simulator.mean_report import mean_report
from simulator.metrics import latencies, served_requests
from simulator.parallel import Runner
from simulator.request_needs import allowed_e2e_s
from simulator.scenario import Scenario
from simulator.sizing import sized
from simulator.workload import Workload

GROWTH = 2  # a rule may use so many times the instances with which it begins


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTrial:
    """One run whose cost is wanted; with the rule `static`, the number of instances does not change."""

    scenario: Scenario
    policy: str
    num_instances: int
    rate: float | None
    seed: int
    rule: str = STATIC
    cold_start_s: float = 60.0
    tiers: Tiers = ()  # between which instances move, with a rule


def serving_cost(trial: CostTrial) -> dict[str, Any]:
    """Simulate once; return the instance-seconds per request, those outside the best-effort pool, and what attained.

    The report of `block simulate` is a part of it, also by class, tier, entry and tenant.
    """
    scenario = sized(trial.scenario, trial.num_instances)
    work = scenario.workload(trial.rate, trial.seed)
    if trial.rule == STATIC:
        result = simulate(scenario.instance_specs(), work, trial.policy, scenario.conditions, seed=trial.seed)
        instance_s = serving_s = result.up_s
    else:
        available = sized(scenario, GROWTH * trial.num_instances).instance_specs()
        done = simulate_provisioned(
            available, work, trial.policy, _options(trial, scenario, work), scenario.conditions, seed=trial.seed
        )
        result, instance_s, serving_s = done.result, done.instance_s, done.serving_s
    return {
        "instance_s_per_request": instance_s / len(work),
        "serving_s_per_request": serving_s / len(work),
        "attained": (found := attained_in(result))["attained"],
        "attained_tokens": found["attained_tokens"],
        **attainment_report(served_requests(result, latencies(result))),
    }


def mean_cost(trial: CostTrial, seeds: int, runner: Runner) -> Mapping[str, Any]:
    """Average the cost over samples of traffic."""
    trials = [replace(trial, seed=seed) for seed in range(seeds)]
    return mean_report([found for _, found in runner(serving_cost, trials)])


def _options(trial: CostTrial, scenario: Scenario, work: Workload) -> AutoscalingOptions:
    config = scenario.instance_specs()[0].config
    return AutoscalingOptions(
        rule=trial.rule,
        first=trial.num_instances,
        cold_start_s=trial.cold_start_s,
        objectives=ScalingObjectives(
            threshold_s=allowed_e2e_s(work) or ScalingObjectives().threshold_s,
            cold_start_s=trial.cold_start_s,
            seats=config.max_num_seqs,
            kv_tokens=(config.num_gpu_blocks - 1) * config.block_size,
        ),
        limits=ScalingLimits(max_instances=GROWTH * trial.num_instances),
        tiers=trial.tiers,
    )
