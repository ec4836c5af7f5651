"""Simulated tiers: instances of a simulated cluster move between them by the planner of the live provisioner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from predictor.tabulated_costs import step_seconds, tabulate
from scheduler.indicators import INDEX_OF
from scheduler.instances import PREFILL_ROLE
from scheduler.provisioning.pool_state import TierNeeds
from scheduler.provisioning.tier_planner import POOL, TierInstance, TierMove, TierPlace, TierPlanner
from scheduler.provisioning.tiers import Tiers, require_served
from simulator.fleet import InstanceSpec
from simulator.run import Simulation

NUM_REQUESTS = [INDEX_OF[name] for name in ("num_running", "num_waiting", "num_reserved")]
LEAST_TPOT = INDEX_OF["least_tpot_slo_s"]


class SimulatedTiers:
    """Moves the instances of one simulation between tiers, by the planner of the live provisioner."""

    def __init__(self, sim: Simulation, tiers: Tiers, *, hold_s: float, settle_s: float) -> None:
        """Start with all instances in the best-effort pool; refuse a tier that none of them can serve."""
        self._alone_s = [_alone_step_s(spec) for spec in sim.specs]
        decoding_s = [
            alone_s for alone_s, spec in zip(self._alone_s, sim.specs, strict=True) if spec.role != PREFILL_ROLE
        ]
        require_served(tiers, min(decoding_s, default=math.nan))
        self.moves: list[tuple[float, TierMove]] = []
        self.needs = TierNeeds()
        self.tier_s = dict.fromkeys([tier.name for tier in tiers], 0.0)
        self._pending_s = 0.0
        self._sim = sim
        self._planner = TierPlanner(tiers, hold_s=hold_s, settle_s=settle_s)
        self._bounds_s = {tier.name: tier.tpot_slo_s for tier in tiers}
        self._names = sim.schedulers[0].table.known.instance_ids
        self._places = dict.fromkeys(self._names, POOL)
        self._counted_s = 0.0  # up to when serving time is counted
        self._served_until: list[tuple[float, float]] = [(0.0, 0.0)]  # (time, serving time until then)

    def plan(self, now_s: float, ready: Sequence[int]) -> None:
        """Move the instances that are ready; others have no tier."""
        self._count(now_s)
        reported = self._sim.reported
        instances = [
            TierInstance(
                instance_id=self._names[index],
                place=self._places[self._names[index]],
                num_requests=int(reported[NUM_REQUESTS, index].sum()),
                least_tpot_slo_s=float(reported[LEAST_TPOT, index]),
                alone_step_s=self._alone_s[index],
                role=self._sim.specs[index].role,
            )
            for index in ready
        ]
        waiting: Counter[float] = Counter()
        for scheduler in self._sim.schedulers:
            waiting.update(scheduler.core.waiting_targets())
        plan = self._planner.plan(now_s, instances, waiting)
        self.needs = plan.needs
        self.moves += [(now_s, move) for move in plan.moves]
        for name, before in self._places.items():
            place = plan.places.get(name, POOL)
            if place != before:
                self._set_place(name, place)

    def _set_place(self, name: str, place: TierPlace) -> None:
        self._places[name] = place
        bound_s = self._bounds_s.get(place.tier, math.inf)
        for scheduler in self._sim.schedulers:
            scheduler.table.set_tier(name, bound_s, closed=place.closed)

    def _count(self, now_s: float) -> None:
        passed_s, self._counted_s = max(0.0, now_s - self._counted_s), max(now_s, self._counted_s)
        for place in self._places.values():
            if place.tier and place.closed:
                self._pending_s += passed_s
            elif place.tier:
                self.tier_s[place.tier] += passed_s
        self._served_until.append((self._counted_s, self._pending_s + sum(self.tier_s.values())))

    def serving_s(self, end_s: float, start_s: float = 0.0) -> float:
        """Return the time that instances spent in tiers, or pending, from the start until the end."""
        self._count(end_s)
        times, served = zip(*self._served_until, strict=True)
        return float(np.interp(end_s, times, served) - np.interp(start_s, times, served))


def _alone_step_s(spec: InstanceSpec) -> float:
    """Return the duration of a step that decodes one request, as its predictor sees it."""
    costs = tabulate(
        spec.predicted_step_time or spec.step_time, spec.config.max_num_batched_tokens, spec.config.max_num_seqs
    )
    return float(spec.predicted_pace * step_seconds(costs, 1, 1, 1, 1.0, 0, 0.0, 0.0, 1.0))
