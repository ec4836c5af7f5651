"""Simulated autoscaling: a cluster that grows and shrinks by the provisioner's rules, with cold starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.config import require_count
from scheduler.provisioning import TIERS, rule_from
from scheduler.provisioning.history import PlacedRequest, PoolHistory
from scheduler.provisioning.limits import ScalingLimits, ScalingObjectives, require_times
from scheduler.provisioning.planner import DRAIN, START, Planner
from scheduler.provisioning.tier_planner import TierMove
from scheduler.provisioning.tiers import Tiers, ordered, require_room
from simulator.assembly import simulation
from simulator.conditions import Conditions
from simulator.events import BACK, CALL
from simulator.fleet import InstanceSpec, has_roles, restart
from simulator.request_slots import collect_finished
from simulator.result import RunResult
from simulator.run import Simulation
from simulator.simulated_tiers import SimulatedTiers
from simulator.workload import Workload

STATIC = "static"
TICK_S = 1.0  # between two evaluations of the rule


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingOptions:
    """The rule that changes a cluster's size, the initial size, and the cold start of an instance."""

    rule: str = STATIC
    first: int = 6  # initial number of instances
    cold_start_s: float = 60.0
    objectives: ScalingObjectives = field(default_factory=ScalingObjectives)
    limits: ScalingLimits = field(default_factory=ScalingLimits)
    schedule: str = ""
    tiers: Tiers = ()  # between which instances move, whatever rule changes their number
    tier_hold_s: float = 5.0

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        require_count("first", self.first)
        require_times(self, "cold_start_s", "tier_hold_s")
        object.__setattr__(self, "tiers", ordered(self.tiers))
        require_room(self.tiers, self.limits.max_instances)
        if TIERS in self.rule.split("+") and not self.tiers:
            raise ValueError("tiers: is missing; the rule tiers needs them")
        if self.first > self.limits.max_instances:
            raise ValueError(f"first: {self.first} is more than max_instances {self.limits.max_instances}")
        if self.cold_start_s > self.objectives.horizon_s:
            raise ValueError(
                f"cold_start_s: {self.cold_start_s:g} is longer than horizon_s {self.objectives.horizon_s:g}"
            )
        if self.rule != STATIC:
            rule_from(self.rule, self.objectives, self.schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the number of instances, with its reason."""

    time_s: float
    num_present: int  # after the change, with starting instances
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionedRun:
    """A run with its changes of size and its cost.

    PolyServe counts an instance of the best-effort pool as released: `serving_s` leaves these out, and is `instance_s`
    where there are no tiers.
    """

    result: RunResult
    changes: list[Change]
    instance_s: float  # total time from the request of an instance to its removal
    serving_s: float  # of this, the time in tiers, or pending
    tier_s: Mapping[str, float]  # and the time in each tier
    moves: list[tuple[float, TierMove]]  # between tiers, each with its time

    @property
    def changes_per_h(self) -> float:
        """Changes of size per hour."""
        return 3600.0 * len(self.changes) / max(1e-9, self.result.end_s - float(self.result.work.arrival_s[0]))


def simulate_provisioned(  # noqa: PLR0913 - what a run is made of
    specs: Sequence[InstanceSpec],
    work: Workload,
    policy: str | Mapping[str, Any],
    options: AutoscalingOptions,
    conditions: Conditions | None = None,
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ProvisionedRun:
    """Serve a workload while a rule changes the size of the cluster; `specs` are all available instances."""
    if len(specs) < options.limits.max_instances:
        raise ValueError(
            f"max_instances: {options.limits.max_instances} is more than the {len(specs)} available instances"
        )
    if options.rule != STATIC and has_roles(specs):
        raise ValueError(
            "instances.role: the number of instances with roles does not change in a simulation; leave out the roles, "
            "or the rule that changes it (--provision)"
        )
    sim = simulation(specs, work, policy, conditions or Conditions(), seed=seed)
    if not sim.schedulers[0].policy.needs_forecast:
        raise ValueError(f"policy: {sim.schedulers[0].policy.text} makes no forecasts, which the rules need")
    provisioner = SimulatedProvisioner(sim, options)
    result = sim.run(progress)
    paid_s = provisioner.paid_s(result.end_s)
    tiers = provisioner.tiers
    return ProvisionedRun(
        result=result,
        changes=provisioner.changes,
        instance_s=paid_s,
        serving_s=paid_s if tiers is None else tiers.serving_s(result.end_s),
        tier_s={} if tiers is None else tiers.tier_s,
        moves=[] if tiers is None else tiers.moves,
    )


def moved_between_tiers(sim: Simulation, tiers: Tiers) -> SimulatedTiers:
    """Move all instances of a new simulation between tiers while it runs; none is started or removed."""
    num = len(sim.specs)
    options = AutoscalingOptions(first=num, limits=ScalingLimits(max_instances=num), tiers=tiers)
    moved = SimulatedProvisioner(sim, options).tiers
    assert moved is not None
    return moved


class SimulatedProvisioner:
    """Starts and drains the instances of one simulation by a rule."""

    def __init__(self, sim: Simulation, options: AutoscalingOptions) -> None:
        """Remove all but the initial instances, and schedule the first tick."""
        self.changes: list[Change] = []
        self.tiers = (
            SimulatedTiers(sim, options.tiers, hold_s=options.tier_hold_s, settle_s=TICK_S) if options.tiers else None
        )
        self._sim, self._options = sim, options
        self._observed = PoolHistory(options.objectives, options.limits)
        self._planner = None
        if options.rule != STATIC:
            self._planner = Planner(
                rule_from(options.rule, options.objectives, options.schedule), options.limits, self._observed
            )
        self._names = list(sim.schedulers[0].table.known.instance_ids)
        self._requested_s = dict.fromkeys(range(options.first), 0.0)  # of all instances that are paid for
        self._starting: dict[int, float] = {}
        self._paid_s = 0.0
        self._open = np.zeros(0, np.int64)
        self._new: list[int] = []
        for index in range(options.first, len(sim.specs)):
            self._remove(index, 0.0)
        sim.decided = self._placed
        sim.events.schedule(0.0, CALL, self._tick)

    def paid_s(self, end_s: float) -> float:
        """Return the total time for which instances were paid for."""
        return self._paid_s + sum(max(0.0, end_s - since_s) for since_s in self._requested_s.values())

    def _placed(self, number: int, index: int, now_s: float, ends_s: npt.NDArray[np.float64]) -> None:
        next_best = np.partition(ends_s, 1)[1] if len(ends_s) > 1 else math.nan
        lengths = self._sim.work.lengths
        self._observed.add_placement(
            now_s,
            PlacedRequest(
                request_id=str(number),
                instance_id=self._names[index],
                prompt_tokens=int(lengths.prompt_tokens[number]),
                output_tokens=int(self._sim.tag_tokens[number]),
                e2e_s=float(ends_s.min()),
                next_best_e2e_s=float(next_best),
            ),
        )
        self._new.append(number)

    def _tick(self, now_s: float) -> None:
        sim = self._sim
        sim.refresh(now_s)
        self._observe_finished(now_s)
        self._remove_drained(now_s)
        for index in [index for index, ready_s in self._starting.items() if ready_s <= now_s]:
            self._observed.cold_starts.measured(now_s - self._requested_s[index])
            del self._starting[index]
        if self.tiers is not None:
            self.tiers.plan(now_s, self._ready())
        if self._planner is not None:
            self._plan(now_s, self._planner)
        if now_s <= sim.work.arrival_s[-1] or self.tiers is not None:  # instances leave tiers until the run is over
            sim.events.schedule(now_s + TICK_S, CALL, self._tick)
        elif sim.available.leaving:  # only until draining instances are removed
            sim.events.schedule(now_s + TICK_S, CALL, self._await_drained)

    def _await_drained(self, now_s: float) -> None:
        self._sim.refresh(now_s)
        self._remove_drained(now_s)
        if self._sim.available.leaving:
            self._sim.events.schedule(now_s + TICK_S, CALL, self._await_drained)

    def _ready(self) -> list[int]:
        leaving = self._sim.available.leaving
        return [index for index in self._requested_s if index not in self._starting and index not in leaving]

    def _plan(self, now_s: float, planner: Planner) -> None:
        sim = self._sim
        names = [self._names[index] for index in self._ready()]
        needs = None if self.tiers is None else self.tiers.needs
        decision = planner.plan(now_s, names, len(self._starting), unix_s=now_s, tiers=needs)
        if decision.kind == START:
            for index in [one for one in range(len(self._names)) if one not in self._requested_s][: decision.num]:
                self._requested_s[index] = now_s
                sim.available.removed.remove(index)
                self._starting[index] = now_s + self._options.cold_start_s
                sim.events.schedule(now_s + self._options.cold_start_s, BACK, index)
        elif decision.kind == DRAIN:
            sim.available.leaving.update(self._names.index(name) for name in decision.instance_ids)
            sim.available.update(sim.fleet)
        else:
            return
        planner.applied(now_s, decision)
        self.changes.append(Change(time_s=now_s, num_present=decision.num_desired, why=decision.why))

    def _observe_finished(self, now_s: float) -> None:
        sim = self._sim
        for index in sim.available.up:
            collect_finished(sim.fleet, sim.requests, index)
        numbers = np.concatenate([self._open, np.array(self._new, np.int64)])
        self._new.clear()
        finished_s = sim.requests.outcomes.finished_s[numbers]
        ended = (finished_s >= 0) & (finished_s <= now_s)
        for number, end_s in zip(numbers[ended].tolist(), finished_s[ended].tolist(), strict=True):
            self._observed.add_end(now_s, str(number), end_s - float(sim.work.arrival_s[number]))
        self._open = numbers[~ended]

    def _remove_drained(self, now_s: float) -> None:
        """Remove draining instances that have no requests left."""
        sim = self._sim
        for index in sorted(sim.available.leaving):
            head = sim.fleet.stack.engine[index, 0]
            if head.num_running + head.num_waiting + head.num_pending:
                continue
            collect_finished(sim.fleet, sim.requests, index)
            restart(sim.fleet, index, sim.specs[index], now_s)
            sim.available.leaving.remove(index)
            self._remove(index, now_s)
            self._paid_s += now_s - self._requested_s.pop(index)

    def _remove(self, index: int, now_s: float) -> None:
        self._sim.available.removed.add(index)
        self._sim.available.went_down(self._sim.fleet, index, now_s)
