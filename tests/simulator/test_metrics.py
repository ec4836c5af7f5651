"""Numbers are what they say they are."""

from __future__ import annotations

import io

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
    summary,
    table,
    write_csv,
)
from simulator.workload import RequestLengths, workload
from tests.simulator.small_clusters import SECOND, Unit, config, poisson, units


def hand() -> Unit:
    """An engine with one seat whose steps take a second."""
    return Unit(config=config(max_num_seqs=1), step_time=SECOND)


def test_latencies_of_a_case_worked_by_hand() -> None:
    """Two requests on one seat: prompts take a step, each further token another."""
    work = workload(
        RequestLengths(prompt_tokens=np.array([5, 5]), output_tokens=np.array([3, 1])), np.array([0.0, 0.5])
    )
    result = simulate([hand()], work, "random", Conditions(decision_s=0.25, network_s=0.25))
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


def test_what_never_came_counts_as_late() -> None:
    """A percentile over all requests is infinite where too many never got a token."""
    values = np.array([1.0] * 98 + [np.nan] * 2)
    assert percentile_of_all(values, 90) == 1.0
    assert percentile_of_all(values, 99) == np.inf


def test_instance_seconds_leave_outages_out() -> None:
    """Time in which an instance is not there is not counted."""
    work = poisson(50, 5.0)
    result = simulate(units(2), work, "jsq", Conditions(outages=(Outage(instance=1, from_s=2.0, until_s=5.0),)))
    assert result.up_s == pytest.approx(2 * result.end_s - 3.0)


def test_imbalance_is_zero_where_all_do_the_same() -> None:
    """Equal prompts in turn are balanced; all of them on one instance are as far from it as can be."""
    num = 40
    work = workload(RequestLengths(prompt_tokens=np.full(num, 50), output_tokens=np.full(num, 2)), np.arange(num) * 1.0)
    even = simulate(units(2), work, "round_robin")
    assert prefill_imbalance(even) == pytest.approx(0.0)
    uneven = simulate(units(2), work, "expr: 0 * batch_size")
    assert prefill_imbalance(uneven) == pytest.approx(1.0)


def test_memory_is_watched_over_time() -> None:
    """Free blocks are sampled once a second; an idle cluster has them all."""
    summed = summary(simulate(units(2), poisson(100, 10.0), "jsq"))
    assert 0 < summed["free_blocks"]["mean"] < 120
    assert summed["free_blocks"]["variance"] > 0


def test_rows_are_written_as_csv() -> None:
    """A header and a row for each request; what never came is empty."""
    work = workload(
        RequestLengths(prompt_tokens=np.array([5, 600]), output_tokens=np.array([1, 1])), np.array([0.0, 0.5])
    )
    result = simulate([hand()], work, "random")
    out = io.StringIO()
    write_csv(table(result), out)
    head, first, second = out.getvalue().splitlines()
    assert head.startswith("number,arrival_s,prompt_tokens")
    assert "finished,instance-0" in first
    assert "refused,," in second
    assert p99_ttft_s(result) == np.inf
