"""The load of simulated engines as times, against the plain reading with which that of sidecars is compared as well."""

from __future__ import annotations

from unittest import mock

import pytest

from predictor.state import State
from predictor.tabulated_costs import Costs
from scheduler.indicators import INDEX_OF
from simulator.assembly import simulation
from simulator.conditions import Conditions
from simulator.fleet import InstanceSpec
from simulator.mix import MixEntry, mixed_workload
from simulator.run import Simulation
from tests.load_by_hand import load_by_hand
from tests.simulator.small_clusters import config, poisson
from tests.strategies import AFFINE

MIX = (
    MixEntry(name="strict", share=1.0, ttft_slo_s=1.0, tpot_slo_s=0.05),
    MixEntry(name="loose", share=2.0, ttft_slo_s=5.0, tpot_slo_s=0.2),
    MixEntry(name="any", share=2.0),
)
REFRESH = Simulation.refresh


def test_the_load_of_simulated_engines_is_that_of_sidecars() -> None:
    """At every decision, of each engine."""
    compared: list[dict[str, float]] = []

    def refresh(self: Simulation, now_s: float) -> None:
        REFRESH(self, now_s)
        for index, spec in enumerate(specs):
            costs = Costs(*(array[index] for array in self.fleet.predicted_costs))
            state = State(*(array[index] for array in self.fleet.stack[:-1]), costs)  # as `engine_at`
            by_hand = load_by_hand(state, spec.config)
            assert {name: self.reported[INDEX_OF[name], index] for name in by_hand} == pytest.approx(by_hand)
            compared.append(by_hand)

    work = mixed_workload(poisson(200, 20.0), MIX, seed=1)
    specs = [InstanceSpec(config=config(max_num_seqs=4), step_time=AFFINE) for _ in range(3)]
    with mock.patch.object(Simulation, "refresh", refresh):
        simulation(specs, work, "least_loaded", Conditions(sample_s=0.0)).run()
    assert len(compared) >= 600
    assert sum(one["queued_prefill_s"] > 0 for one in compared) > 100
    assert sum(one["efficient_step_s"] < float("inf") for one in compared) > 100
    assert {0.05, 0.2, float("inf")} <= {one["least_tpot_slo_s"] for one in compared}
