"""What provisioning rules come to, shape by shape: latencies beside what was paid for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scheduler.provisioning.limits import Aims, Limits
from services.simulator.measures import latencies
from services.simulator.provisioning import STATIC, Provisioning, provisioned
from services.simulator.scenario import Scenario, scenario_from
from services.simulator.spreading import Runner

RULES = (STATIC, "relief", "preempt", "headroom")
PAPERS = ("relief", "preempt")  # which never shrink
NUMBERS = ("p99_e2e_s", "over_threshold_requests", "instance_s", "most_instances", "changes_per_h")
SHAPES = ("constant", "step", "ramp", "burst", "diurnal")
FIGURE = "fig8"  # the paper's own: constant, and backups that are there at once
THRESHOLD_S, COOLDOWN_S = 70.0, 15.0
UNITS = ("s", "requests", "s", "instances", "1/h")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Traffic whose rate changes: (from when in s, requests/s), to an end; and with how many instances it begins."""

    name: str
    first: int
    rates: tuple[tuple[float, float], ...]
    seconds: float
    cold_start_s: float
    counts: bool = True  # among the shapes in which headroom is to be no worse

    @property
    def num_requests(self) -> int:
        """How many come on average."""
        ends = [*(start_s for start_s, _ in self.rates[1:]), self.seconds]
        return round(sum(rate * (end_s - start_s) for (start_s, rate), end_s in zip(self.rates, ends, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One shape, by one rule."""

    scenario: Scenario
    shape: Shape
    rule: str
    most: int
    threshold_s: float
    seed: int


def shapes(cold_start_s: float, suffix: str, *, counts: bool) -> list[Shape]:
    """Make the five: constant, a step, a ramp, a burst, and a day that lasts an hour."""
    ramp = ((0.0, 8.0), *((300.0 + 30.0 * step, 8.0 + 16.0 * (step + 1) / 20) for step in range(20)))
    day = tuple((60.0 * minute, 16.0 - 10.0 * math.cos(math.tau * (minute + 0.5) / 60)) for minute in range(60))
    drawn: list[tuple[str, int, tuple[tuple[float, float], ...], float]] = [
        ("constant", 6, ((0.0, 24.0),), 10_000 / 24),
        ("step", 5, ((0.0, 12.0), (300.0, 24.0)), 1200.0),
        ("ramp", 4, ramp, 1500.0),
        ("burst", 5, ((0.0, 12.0), (300.0, 26.0), (480.0, 12.0)), 1200.0),
        ("diurnal", 3, day, 3600.0),
    ]
    return [
        Shape(name=f"{name}{suffix}", first=first, rates=rates, seconds=seconds, cold_start_s=cold_start_s,
              counts=counts)
        for name, first, rates, seconds in drawn
    ]  # fmt: skip


ALL_SHAPES = (
    *shapes(60.0, "", counts=True),
    *(replace(shape, name=FIGURE, cold_start_s=0.0, counts=False) for shape in shapes(0.0, "", counts=True)[:1]),
    *shapes(300.0, "_cold300", counts=False),
)


def run_shape(run: Run) -> dict[str, Any]:
    """Run one; give its numbers."""
    table = {"schedule": [list(pair) for pair in run.shape.rates], "num_requests": run.shape.num_requests}
    scenario = run.scenario.changed(traffic=table)
    units = scenario.units()
    config = units[0].config
    aims = Aims(
        threshold_s=run.threshold_s,
        cold_start_s=run.shape.cold_start_s,
        seats=config.max_num_seqs,
        kv_tokens=config.block_size * config.num_gpu_blocks,
    )
    limits = Limits(max_instances=run.most, shrink=run.rule not in PAPERS, cooldown_s=COOLDOWN_S, calm_s=120.0)
    first = run.most if run.rule == STATIC else run.shape.first
    how = Provisioning(rule=run.rule, first=first, cold_start_s=run.shape.cold_start_s, aims=aims, limits=limits)
    done = provisioned(units, scenario.workload(None, run.seed), "block", how, scenario.conditions, seed=run.seed)
    e2e_s = latencies(done.result).e2e_s
    return {
        "p99_e2e_s": float(np.quantile(np.where(np.isnan(e2e_s), np.inf, e2e_s), 0.99)),
        "over_threshold_requests": float((~(e2e_s <= run.threshold_s)).sum()),
        "instance_s": done.instance_s,
        "most_instances": float(max([first, *(change.num_present for change in done.changes)])),
        "changes_per_h": done.changes_per_h,
        "timeline": [[0.0, first], *([change.time_s, change.num_present] for change in done.changes)],
    }


def measured(
    table: Mapping[str, Any], names: Sequence[str], seeds: int, runner: Runner, told: Callable[[int, int], None]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Run every shape by every rule; by shape and rule, a result for each seed."""
    base = scenario_from(table)
    wanted = [shape for shape in ALL_SHAPES if shape.name in names]
    runs = [
        Run(scenario=base, shape=shape, rule=rule, most=len(base.units()), threshold_s=THRESHOLD_S, seed=seed)
        for shape in wanted for rule in RULES for seed in range(seeds)
    ]  # fmt: skip
    found: list[dict[str, Any] | None] = [None] * len(runs)
    for done, (place, result) in enumerate(runner(run_shape, runs), 1):
        found[place] = result
        told(done, len(runs))
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run, outcome in zip(runs, found, strict=True):
        assert outcome is not None
        by_case.setdefault((run.shape.name, run.rule), []).append(outcome)
    return by_case


def dominates(found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], shape: str) -> bool:
    """Tell whether headroom took no more instance-seconds than either rule of the paper, at no worse a P99."""

    def mean(rule: str, number: str) -> float:
        return float(np.mean([one[number] for one in found[shape, rule]]))

    return all(
        mean("headroom", number) <= mean(rule, number) for rule in PAPERS for number in ("p99_e2e_s", "instance_s")
    )
