"""A simulated cluster that grows and shrinks by the provisioner's own rules, cold starts included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.config import require_count
from scheduler.provisioning import rule_from
from scheduler.provisioning.limits import Aims, ScalingLimits, require_times
from scheduler.provisioning.observed import Observed, Placed
from scheduler.provisioning.planner import DRAIN, START, Planner
from simulator import kernels
from simulator.assembly import simulation
from simulator.conditions import Conditions
from simulator.fleet import Unit, restart
from simulator.result import RunResult
from simulator.run import BACK, CALL, Simulation
from simulator.workload import Workload

STATIC = "static"
TICK_S = 1.0  # between two looks of the provisioner


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioning:
    """By which rule a cluster changes its size, from how many, and how long an instance takes to come."""

    rule: str = STATIC
    first: int = 6  # instances in the beginning
    cold_start_s: float = 60.0
    aims: Aims = field(default_factory=Aims)
    limits: ScalingLimits = field(default_factory=ScalingLimits)
    schedule: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be, by name."""
        require_count("first", self.first)
        require_times(self, "cold_start_s")
        if self.first > self.limits.max_instances:
            raise ValueError(f"first: {self.first} is more than max_instances {self.limits.max_instances}")
        if self.cold_start_s > self.aims.horizon_s:
            raise ValueError(f"cold_start_s: {self.cold_start_s:g} is longer than horizon_s {self.aims.horizon_s:g}")
        if self.rule != STATIC:
            rule_from(self.rule, self.aims, self.schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A moment at which more were asked for, or some let go, and why."""

    time_s: float
    num_present: int  # from then on, starting ones included
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Provisioned:
    """A run, and what it took."""

    result: RunResult
    changes: list[Change]
    instance_s: float  # from being asked for to having left, in sum

    @property
    def changes_per_h(self) -> float:
        """How often the size changed."""
        return 3600.0 * len(self.changes) / max(1e-9, self.result.end_s - float(self.result.work.arrival_s[0]))


def provisioned(  # noqa: PLR0913 - what a run is made of
    units: Sequence[Unit],
    work: Workload,
    policy: str | Mapping[str, Any],
    how: Provisioning,
    conditions: Conditions | None = None,
    *,
    seed: int = 0,
) -> Provisioned:
    """Serve a workload while a rule looks after the size of the cluster; `units` are all that may be had."""
    if len(units) < how.limits.max_instances:
        raise ValueError(f"max_instances: {how.limits.max_instances} are more than the {len(units)} that there are")
    sim = simulation(units, work, policy, conditions or Conditions(), seed=seed)
    if not sim.schedulers[0].policy.needs_forecast:
        raise ValueError(f"policy: {sim.schedulers[0].policy.text} makes no forecasts, which rules are made of")
    growing = Growing(sim, how)
    result = sim.run()
    return Provisioned(result=result, changes=growing.changes, instance_s=growing.paid_s(result.end_s))


class Growing:
    """Looks after the instances of one simulation."""

    def __init__(self, sim: Simulation, how: Provisioning) -> None:
        """Take away all but the first ones, and begin to look."""
        self.changes: list[Change] = []
        self._sim, self._how = sim, how
        self._observed = Observed(how.aims, how.limits)
        self._planner = None
        if how.rule != STATIC:
            self._planner = Planner(rule_from(how.rule, how.aims, how.schedule), how.limits, self._observed)
        self._names = list(sim.schedulers[0].table.known.instance_ids)
        self._asked_s = dict.fromkeys(range(how.first), 0.0)  # instances that are paid for
        self._starting: dict[int, float] = {}
        self._paid_s = 0.0
        self._open = np.zeros(0, np.int64)
        self._new: list[int] = []
        sim.up_since = dict.fromkeys(range(how.first), 0.0)
        sim.fleet.units.up[how.first :] = 0
        sim.find_places()
        sim.decided = self._placed
        sim.schedule(0.0, CALL, self._tick)

    def paid_s(self, end_s: float) -> float:
        """Sum up what instances were paid for."""
        return self._paid_s + sum(max(0.0, end_s - since_s) for since_s in self._asked_s.values())

    def _placed(self, number: int, index: int, now_s: float, ends_s: npt.NDArray[np.float64]) -> None:
        elsewhere = np.partition(ends_s, 1)[1] if len(ends_s) > 1 else math.nan
        lengths = self._sim.work.lengths
        self._observed.placed(
            now_s,
            Placed(
                request_id=str(number),
                instance_id=self._names[index],
                prompt_tokens=int(lengths.prompt_tokens[number]),
                output_tokens=int(self._sim.tag_tokens[number]),
                e2e_s=float(ends_s.min()),
                next_best_e2e_s=float(elsewhere),
            ),
        )
        self._new.append(number)

    def _tick(self, now_s: float) -> None:
        sim = self._sim
        sim.look(now_s)
        self._hear_of_ends(now_s)
        self._let_go(now_s)
        for index in [index for index, ready_s in self._starting.items() if ready_s <= now_s]:
            self._observed.cold_starts.measured(now_s - self._asked_s[index])
            del self._starting[index]
        if self._planner is not None:
            self._plan(now_s, self._planner)
        if now_s <= sim.work.arrival_s[-1]:
            sim.schedule(now_s + TICK_S, CALL, self._tick)
        elif sim.leaving:  # only to see them off
            sim.schedule(now_s + TICK_S, CALL, self._see_off)

    def _see_off(self, now_s: float) -> None:
        self._sim.look(now_s)
        self._let_go(now_s)
        if self._sim.leaving:
            self._sim.schedule(now_s + TICK_S, CALL, self._see_off)

    def _plan(self, now_s: float, planner: Planner) -> None:
        sim = self._sim
        ready = [index for index in self._asked_s if index not in self._starting and index not in sim.leaving]
        decision = planner.plan(now_s, [self._names[index] for index in ready], len(self._starting), unix_s=now_s)
        if decision.kind == START:
            for index in [one for one in range(len(self._names)) if one not in self._asked_s][: decision.num]:
                self._asked_s[index] = now_s
                self._starting[index] = now_s + self._how.cold_start_s
                sim.schedule(now_s + self._how.cold_start_s, BACK, index)
        elif decision.kind == DRAIN:
            sim.leaving.update(self._names.index(name) for name in decision.instance_ids)
            sim.find_places()
        else:
            return
        planner.done(now_s, decision)
        self.changes.append(Change(time_s=now_s, num_present=decision.num_desired, why=decision.why))

    def _hear_of_ends(self, now_s: float) -> None:
        sim = self._sim
        for index in sim.up_since:
            kernels.harvest(sim.fleet, sim.requests, index)
        numbers = np.concatenate([self._open, np.array(self._new, np.int64)])
        self._new.clear()
        finished_s = sim.requests.outcomes.finished_s[numbers]
        ended = (finished_s >= 0) & (finished_s <= now_s)
        for number, end_s in zip(numbers[ended].tolist(), finished_s[ended].tolist(), strict=True):
            self._observed.ended(now_s, str(number), end_s - float(sim.work.arrival_s[number]))
        self._open = numbers[~ended]

    def _let_go(self, now_s: float) -> None:
        """Take away those that were to leave and have nothing left."""
        sim = self._sim
        for index in sorted(sim.leaving):
            head = sim.fleet.stack.engine[index, 0]
            if head.num_running + head.num_waiting + head.num_pending:
                continue
            kernels.harvest(sim.fleet, sim.requests, index)
            restart(sim.fleet, index, sim.units[index], now_s)
            sim.fleet.units[index].up = 0
            sim.up_s += now_s - sim.up_since.pop(index)
            sim.leaving.remove(index)
            self._paid_s += now_s - self._asked_s.pop(index)
        sim.find_places()
