"""Searches stay between rates at which requests hardly meet, and at which all arrive within about one step."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.assembly import simulate
from simulator.metrics import latencies
from simulator.rate_limits import LONG_S, conditions_of_trial, rate_limits
from tests.simulator.test_capacity import scenario


def test_limits_are_about_one_request_and_about_one_step() -> None:
    """Requests overlap in few cases at the lowest rate; at the highest, all arrive before the second step."""
    made = scenario(traffic={"num_requests": 500})
    limits = rate_limits(made, made.workload(1.0, 0))
    work = made.workload(limits.lowest, 0)
    took = latencies(simulate(made.instance_specs(), work, "jsq", made.conditions))
    alone = np.diff(work.arrival_s) > took.e2e_s[:-1]
    assert 0.97 < alone.mean() < 1
    work = made.workload(limits.highest, 0)
    shortest_s = float(np.nanmin(took.tpot_s))
    assert 0.5 * shortest_s < work.arrival_s[-1] - work.arrival_s[0] < 1.5 * shortest_s


def test_rates_of_a_schedule_are_multiples() -> None:
    """The limits of the multiple are lower, as the schedule has the rates."""
    plain, scheduled = scenario(), scenario(traffic={"schedule": [[0, 10], [10, 20]]})
    limits = [rate_limits(made, made.workload(1.0, 0)) for made in (plain, scheduled)]
    assert limits[1].lowest == pytest.approx(limits[0].lowest / 20)
    assert limits[1].highest == pytest.approx(limits[0].highest / 10)


def test_long_trials_have_no_samples() -> None:
    """Samples of a run of days take more time than the run; shorter ones are as they were."""
    made = scenario(conditions={"sample_s": 1.0})
    assert conditions_of_trial(made.conditions, made.workload(10.0, 0)) == made.conditions
    assert conditions_of_trial(made.conditions, made.workload(100 / LONG_S, 0)).sample_s == 0
