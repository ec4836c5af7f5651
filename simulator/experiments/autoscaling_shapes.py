"""What provisioning rules come to, shape by shape: latencies beside what was paid for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from scheduler.provisioning import RULE_NAMES, SCHEDULE
from scheduler.provisioning.limits import Aims, ScalingLimits
from simulator.autoscaling import STATIC, Change, Provisioning, provisioned
from simulator.experiments.ledger import digest_of
from simulator.metrics import latencies
from simulator.parallel import Runner
from simulator.scenario import Scenario, scenario_from

RULES = (STATIC, "relief", "preempt", "headroom")
PAPERS = ("relief", "preempt")  # which never shrink
NUMBERS = ("p99_e2e_s", "over_threshold_requests", "instance_s", "most_instances", "changes_per_h", "turns")
UNITS = ("s", "requests", "s", "instances", "1/h", "")
FIGURE = "fig8"  # the paper's own: constant, and backups that are there at once
SHAPES = (FIGURE, "step", "ramp", "burst", "diurnal")
COLD = "_cold300"
COLD_SHAPES = tuple(f"{name}{COLD}" for name in ("constant", *SHAPES[1:]))
THRESHOLD_S, COOLDOWN_S = 70.0, 15.0
MINUTE_S = 60.0
OVER_TIME = "instances over time"
CODE = ("scheduler/provisioning", "simulator/autoscaling.py")  # what the ledger's own digest leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """Traffic whose rate changes: (from when in s, requests/s), to an end; and with how many instances it begins."""

    name: str
    first: int
    rates: tuple[tuple[float, float], ...]
    seconds: float
    cold_start_s: float

    @property
    def num_requests(self) -> int:
        """How many come on average."""
        ends = [*(start_s for start_s, _ in self.rates[1:]), self.seconds]
        return round(sum(rate * (end_s - start_s) for (start_s, rate), end_s in zip(self.rates, ends, strict=True)))

    def peaks(self, each_per_s: float) -> str:
        """Write down how many instances it takes, minute by minute, where each serves so many requests a second."""
        minutes = range(math.ceil(self.seconds / MINUTE_S))
        wanted = [(minute, math.ceil(self._highest(minute * MINUTE_S) / each_per_s)) for minute in minutes]
        spans = [[minute for minute, _ in same] for _, same in groupby(wanted, key=lambda one: one[1])]
        number = dict(wanted)
        return "; ".join(f"{_clock(span[0])}-{_clock(span[-1] + 1)}={number[span[0]]}" for span in spans)

    def _highest(self, from_s: float) -> float:
        """Tell the highest rate of a minute."""
        before = [rate for start_s, rate in self.rates if start_s <= from_s]
        within = [rate for start_s, rate in self.rates if from_s < start_s < from_s + MINUTE_S]
        return max([before[-1], *within])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRun:
    """One shape, by one rule; `code` names the rules' own."""

    scenario: Scenario
    shape: LoadShape
    rule: str  # relief, or relief@50 where it is to act at 50 s; schedule@2.8 knows what comes
    most: int
    seed: int
    code: str


def shapes(cold_start_s: float, suffix: str = "") -> list[LoadShape]:
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
        LoadShape(name=f"{name}{suffix}", first=first, rates=rates, seconds=seconds, cold_start_s=cold_start_s)
        for name, first, rates, seconds in drawn
    ]


ALL_SHAPES = (*(replace(shape, name=FIGURE) for shape in shapes(0.0)[:1]), *shapes(60.0), *shapes(300.0, COLD))


def require_rules(rules: Sequence[str]) -> None:
    """Refuse rules that there are not, and thresholds that make no sense."""
    for text in rules:
        name, at, number = text.partition("@")
        if name not in (STATIC, *RULE_NAMES):
            raise ValueError(f"rules: {name!r} is none of {', '.join((STATIC, *RULE_NAMES))}")
        try:
            sound = (not at and name != SCHEDULE) or (name != STATIC and 0 < float(number) < math.inf)
        except ValueError:
            sound = False
        if not sound:
            raise ValueError(f"rules: {text!r} must be like relief, relief@50 (s) or schedule@2.8 (requests/s of each)")


def run_shape(run: ShapeRun) -> dict[str, Any]:
    """Run one; give its numbers."""
    table = {"schedule": [list(pair) for pair in run.shape.rates], "num_requests": run.shape.num_requests}
    scenario = run.scenario.changed(traffic=table)
    units = scenario.units()
    how = _how(run, scenario)
    done = provisioned(units, scenario.workload(None, run.seed), "block", how, scenario.conditions, seed=run.seed)
    e2e_s = latencies(done.result).e2e_s
    return {
        "p99_e2e_s": float(np.quantile(np.where(np.isnan(e2e_s), np.inf, e2e_s), 0.99)),
        "over_threshold_requests": float((~(e2e_s <= THRESHOLD_S)).sum()),
        "instance_s": done.instance_s,
        "most_instances": float(max([how.first, *(change.num_present for change in done.changes)])),
        "changes_per_h": done.changes_per_h,
        "turns": float(turns(how.first, done.changes)),
        "timeline": [[0.0, how.first], *([change.time_s, change.num_present] for change in done.changes)],
    }


def turns(first: int, changes: Sequence[Change]) -> int:
    """Count how often a cluster grew after it had shrunk, or shrank after it had grown."""
    sizes = [first, *(change.num_present for change in changes)]
    grows = [later > before for before, later in pairwise(sizes) if later != before]
    return sum(one != other for one, other in pairwise(grows))


def measured(  # noqa: PLR0913 - what is measured, and by whom
    table: Mapping[str, Any], names: Sequence[str], rules: Sequence[str], seeds: int, *, runner: Runner,
    told: Callable[[int, int], None],
) -> dict[tuple[str, str], list[dict[str, Any]]]:  # fmt: skip
    """Run every shape by every rule; by shape and rule, a result for each seed."""
    base = scenario_from(table)
    most = len(base.units())
    code = {rule: _code(rule) for rule in rules}
    cases = {
        (shape.name, rule, seed): ShapeRun(
            scenario=base, shape=_unhurried(shape) if rule == STATIC else shape, rule=rule, most=most, seed=seed,
            code=code[rule],
        )
        for shape in ALL_SHAPES if shape.name in names for rule in rules for seed in range(seeds)
    }  # fmt: skip
    runs = list(dict.fromkeys(cases.values()))
    found: dict[ShapeRun, dict[str, Any]] = {}
    for done, (place, result) in enumerate(runner(run_shape, runs), 1):
        found[runs[place]] = result
        told(done, len(runs))
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (shape_name, rule, _), run in cases.items():
        by_case.setdefault((shape_name, rule), []).append(found[run])
    return by_case


# Within.


def _code(rule: str) -> str:
    """Name the code that a run by this rule depends on: an edit of another rule does not make it worthless."""
    name = rule.partition("@")[0]
    places = CODE[-1:] if name == STATIC else CODE
    return digest_of(*places, without=[other for other in RULE_NAMES if other != name])


def _how(run: ShapeRun, scenario: Scenario) -> Provisioning:
    name, _, number = run.rule.partition("@")
    config = scenario.units()[0].config
    aims = Aims(
        threshold_s=float(number) if number and name != SCHEDULE else THRESHOLD_S,
        cold_start_s=run.shape.cold_start_s,
        seats=config.max_num_seqs,
        kv_tokens=config.block_size * config.num_gpu_blocks,
    )
    return Provisioning(
        rule=name,
        first=run.most if name == STATIC else run.shape.first,
        cold_start_s=run.shape.cold_start_s,
        aims=aims,
        limits=ScalingLimits(max_instances=run.most, shrink=name not in PAPERS, cooldown_s=COOLDOWN_S, calm_s=120.0),
        schedule=run.shape.peaks(float(number)) if name == SCHEDULE else "",
    )


def _unhurried(shape: LoadShape) -> LoadShape:
    """Leave out what does not matter where no instance is ever started."""
    return replace(shape, name="", first=0, cold_start_s=0.0)


def _clock(minute: int) -> str:
    return f"{minute // 60 % 24:02d}:{minute % 60:02d}"
