"""Provisioning rules under several load shapes: latencies and paid instance time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from predictor.suggestions import require_choice
from scheduler.provisioning import RULE_NAMES, SCHEDULE, TIERS
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives
from simulator.autoscaling import STATIC, AutoscalingOptions, Change, simulate_provisioned
from simulator.experiments.source_digest import digest_of
from simulator.metrics import latencies
from simulator.parallel import Runner
from simulator.scenario import Scenario, scenario_from

RULES = (STATIC, "relief", "preempt", "headroom")
PAPER_RULES = ("relief", "preempt")  # the paper's rules, which never shrink
NUMBERS = ("p99_e2e_s", "over_threshold_requests", "instance_s", "most_instances", "changes_per_h", "turns")
UNITS = ("s", "requests", "s", "instances", "1/h", "")
FIGURE = "fig8"  # the paper's own shape: constant load, no cold start
SHAPES = (FIGURE, "step", "ramp", "burst", "diurnal")
COLD = "_cold300"
COLD_SHAPES = tuple(f"{name}{COLD}" for name in ("constant", *SHAPES[1:]))
THRESHOLD_S, COOLDOWN_S = 70.0, 15.0
MINUTE_S = 60.0
OVER_TIME = "instances over time"
CODE = ("scheduler/provisioning", "simulator/autoscaling.py")  # what `source_digest` excludes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """Traffic with a changing rate, as pairs (start in s, requests/s), and the initial number of instances."""

    name: str
    first: int
    rates: tuple[tuple[float, float], ...]
    seconds: float
    cold_start_s: float

    @property
    def num_requests(self) -> int:
        """The mean number of requests."""
        ends = [*(start_s for start_s, _ in self.rates[1:]), self.seconds]
        return round(sum(rate * (end_s - start_s) for (start_s, rate), end_s in zip(self.rates, ends, strict=True)))

    def peaks(self, each_per_s: float) -> str:
        """Return the schedule of instances needed in each minute, if one instance serves `each_per_s` requests/s."""
        minutes = range(math.ceil(self.seconds / MINUTE_S))
        needed = [(minute, math.ceil(self._highest(minute * MINUTE_S) / each_per_s)) for minute in minutes]
        spans = [[minute for minute, _ in same] for _, same in groupby(needed, key=lambda one: one[1])]
        number = dict(needed)
        return "; ".join(f"{_clock(span[0])}-{_clock(span[-1] + 1)}={number[span[0]]}" for span in spans)

    def _highest(self, from_s: float) -> float:
        """Return the highest rate of a minute."""
        earlier = [rate for start_s, rate in self.rates if start_s <= from_s]
        within = [rate for start_s, rate in self.rates if from_s < start_s < from_s + MINUTE_S]
        return max([earlier[-1], *within])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRun:
    """One load shape under one rule; `code` is the digest of the rule's code."""

    scenario: Scenario
    shape: LoadShape
    rule: str  # relief; relief@50 with a threshold of 50 s; schedule@2.8 knows the load, at 2.8 requests/s per instance
    max_instances: int
    seed: int
    code: str


def shapes(cold_start_s: float, suffix: str = "") -> list[LoadShape]:
    """Return the five shapes: constant, step, ramp, burst, and a day compressed to an hour."""
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
        LoadShape(name=f"{name}{suffix}", first=first, rates=rates, seconds=seconds, cold_start_s=cold_start_s)
        for name, first, rates, seconds in drawn
    ]


ALL_SHAPES = (*(replace(shape, name=FIGURE) for shape in shapes(0.0)[:1]), *shapes(60.0), *shapes(300.0, COLD))


def require_rules(rules: Sequence[str]) -> None:
    """Reject unknown rules and invalid parameters."""
    for text in rules:
        name, at, number = text.partition("@")
        known = [STATIC, *(rule for rule in RULE_NAMES if rule != TIERS)]  # these requests have no targets
        require_choice("rules", name, known)
        try:
            sound = (not at and name != SCHEDULE) or (name != STATIC and 0 < float(number) < math.inf)
        except ValueError:
            sound = False
        if not sound:
            raise ValueError(f"rules: {text!r} must be like relief, relief@50 (s) or schedule@2.8 (requests/s of each)")


def run_shape(run: ShapeRun) -> dict[str, Any]:
    """Simulate one shape under one rule; return its numbers."""
    table = {"schedule": [list(pair) for pair in run.shape.rates], "num_requests": run.shape.num_requests}
    scenario = run.scenario.changed(traffic=table)
    units = scenario.instance_specs()
    options = _options(run, scenario)
    work = scenario.workload(None, run.seed)
    done = simulate_provisioned(units, work, "block", options, scenario.conditions, seed=run.seed)
    e2e_s = latencies(done.result).e2e_s
    return {
        "p99_e2e_s": float(np.quantile(np.where(np.isnan(e2e_s), np.inf, e2e_s), 0.99)),
        "over_threshold_requests": float((~(e2e_s <= THRESHOLD_S)).sum()),
        "instance_s": done.instance_s,
        "most_instances": float(max([options.first, *(change.num_present for change in done.changes)])),
        "changes_per_h": done.changes_per_h,
        "turns": float(direction_changes(options.first, done.changes)),
        "timeline": [[0.0, options.first], *([change.time_s, change.num_present] for change in done.changes)],
    }


def direction_changes(first: int, changes: Sequence[Change]) -> int:
    """Count how often a cluster grew after shrinking, or shrank after growing."""
    sizes = [first, *(change.num_present for change in changes)]
    grows = [later > before for before, later in pairwise(sizes) if later != before]
    return sum(one != other for one, other in pairwise(grows))


def measure_shapes(  # noqa: PLR0913 - what is measured, and how
    table: Mapping[str, Any], names: Sequence[str], rules: Sequence[str], seeds: int, *, runner: Runner,
    on_progress: Callable[[int, int], None],
) -> dict[tuple[str, str], list[dict[str, Any]]]:  # fmt: skip
    """Simulate every shape under every rule; return the results of all seeds, by shape and rule."""
    base = scenario_from(table)
    num_available = len(base.instance_specs())
    code = {rule: _code(rule) for rule in rules}
    cases = {
        (shape.name, rule, seed): ShapeRun(
            scenario=base, shape=_without_start(shape) if rule == STATIC else shape, rule=rule,
            max_instances=num_available, seed=seed, code=code[rule],
        )
        for shape in ALL_SHAPES if shape.name in names for rule in rules for seed in range(seeds)
    }  # fmt: skip
    runs = list(dict.fromkeys(cases.values()))
    results: dict[ShapeRun, dict[str, Any]] = {}
    for done, (index, result) in enumerate(runner(run_shape, runs), 1):
        results[runs[index]] = result
        on_progress(done, len(runs))
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (shape_name, rule, _), run in cases.items():
        by_case.setdefault((shape_name, rule), []).append(results[run])
    return by_case


# Helpers.


def _code(rule: str) -> str:
    """Return the digest of the code that this rule depends on: edits of other rules do not invalidate results."""
    name = rule.partition("@")[0]
    paths = CODE[-1:] if name == STATIC else CODE
    return digest_of(*paths, exclude=[other for other in RULE_NAMES if other != name])


def _options(run: ShapeRun, scenario: Scenario) -> AutoscalingOptions:
    name, _, number = run.rule.partition("@")
    config = scenario.instance_specs()[0].config
    objectives = ScalingObjectives(
        threshold_s=float(number) if number and name != SCHEDULE else THRESHOLD_S,
        cold_start_s=run.shape.cold_start_s,
        seats=config.max_num_seqs,
        kv_tokens=config.block_size * config.num_gpu_blocks,
    )
    return AutoscalingOptions(
        rule=name,
        first=run.max_instances if name == STATIC else run.shape.first,
        cold_start_s=run.shape.cold_start_s,
        objectives=objectives,
        limits=ScalingLimits(
            max_instances=run.max_instances, shrink=name not in PAPER_RULES, cooldown_s=COOLDOWN_S, calm_s=120.0
        ),
        schedule=run.shape.peaks(float(number)) if name == SCHEDULE else "",
    )


def _without_start(shape: LoadShape) -> LoadShape:
    """Leave out what does not affect a static cluster, so that it is simulated only once."""
    return replace(shape, name="", first=0, cold_start_s=0.0)


def _clock(minute: int) -> str:
    return f"{minute // 60 % 24:02d}:{minute % 60:02d}"
