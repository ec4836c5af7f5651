"""Metrics of runs, against cases worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.assembly import simulate
from simulator.conditions import Conditions, Outage
from simulator.metrics import (
    SloTarget,
    latencies,
    p99_ttft_s,
    percentile_of_all,
    prefill_imbalance,
    request_table,
    summary,
)
from simulator.workload import RequestLengths, workload
from tests.simulator.small_clusters import SECOND, InstanceSpec, config, poisson, specs


def one_at_a_time() -> InstanceSpec:
    """An engine that runs one request at a time, with steps of a second."""
    return InstanceSpec(config=config(max_num_seqs=1), step_time=SECOND)


def test_latencies_of_a_case_worked_out_by_hand() -> None:
    """Two requests, one at a time: a prompt takes a step, each further token another."""
    work = workload(
        RequestLengths(prompt_tokens=np.array([5, 5]), output_tokens=np.array([3, 1])), np.array([0.0, 0.5])
    )
    result = simulate([one_at_a_time()], work, "random", Conditions(decision_s=0.25, network_s=0.25))
    took = latencies(result)
    assert took.ttft_s.tolist() == pytest.approx([1.5, 4.0])
    assert took.e2e_s.tolist() == pytest.approx([3.5, 4.0])
    assert took.tpot_s[0] == pytest.approx(1.0)
    assert np.isnan(took.tpot_s[1])
    summed = summary(result, SloTarget(ttft_s=2.0))
    assert summed["slo_attainment"] == 0.5
    assert summed["span_s"] == pytest.approx(4.5)
    assert summed["requests_per_s"] == pytest.approx(2 / 4.5)
    assert summed["instance_s"] == pytest.approx(4.5)


def test_missing_tokens_count_as_late() -> None:
    """A percentile over all requests is infinite if too many never got a token."""
    values = np.array([1.0] * 98 + [np.nan] * 2)
    assert percentile_of_all(values, 90) == 1.0
    assert percentile_of_all(values, 99) == np.inf


def test_instance_seconds_leave_outages_out() -> None:
    """The time of an outage is not counted."""
    work = poisson(50, 5.0)
    result = simulate(specs(2), work, "jsq", Conditions(outages=(Outage(instance=1, from_s=2.0, until_s=5.0),)))
    assert result.up_s == pytest.approx(2 * result.end_s - 3.0)


def test_prefill_imbalance() -> None:
    """Equal prompts in turn are balanced; all prompts on one instance have the maximum imbalance."""
    num = 40
    work = workload(RequestLengths(prompt_tokens=np.full(num, 50), output_tokens=np.full(num, 2)), np.arange(num) * 1.0)
    even = simulate(specs(2), work, "round_robin")
    assert prefill_imbalance(even) == pytest.approx(0.0)
    uneven = simulate(specs(2), work, "expr: 0 * batch_size")
    assert prefill_imbalance(uneven) == pytest.approx(1.0)


def test_free_blocks_are_sampled() -> None:
    """The mean of the samples lies between no and all blocks."""
    summed = summary(simulate(specs(2), poisson(100, 10.0), "jsq"))
    assert 0 < summed["free_blocks"]["mean"] < 120
    assert summed["free_blocks"]["variance"] > 0


def test_one_row_per_request() -> None:
    """A refused request has no instance and no latencies."""
    work = workload(
        RequestLengths(prompt_tokens=np.array([5, 600]), output_tokens=np.array([1, 1])), np.array([0.0, 0.5])
    )
    result = simulate([one_at_a_time()], work, "random")
    rows = request_table(result)
    assert rows["fate"].tolist() == ["finished", "refused"]
    assert rows["instance"].tolist() == ["instance-0", ""]
    assert np.isnan(rows["e2e_s"]).tolist() == [False, True]
    assert p99_ttft_s(result) == np.inf
