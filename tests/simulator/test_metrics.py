"""Metrics of runs, against cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.gain import GainWeights, ServiceLevels, attainment_report
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
from simulator.mix import mix_from, mixed, mixed_workload
from simulator.replay import replay, served_requests
from simulator.workload import RequestLengths, workload
from tests.simulator.small_clusters import A30, SECOND, InstanceSpec, config, poisson, request, specs


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


def test_attainment_of_a_case_worked_out_by_hand() -> None:
    """Deadlines count from the arrival at the cluster, not at the engine."""
    levels = ServiceLevels(
        ttft_slo_s=np.array([1.5, 2.0, np.nan]), tpot_slo_s=np.array([0.75, 1.0, np.nan]),
        weight=np.array([2.0, 1.0, 1.0]), priority=np.array([0, 1, 1]), request_class=np.array([0, 1, 0]),
    )  # fmt: skip
    lengths = RequestLengths(prompt_tokens=np.array([5, 5, 5]), output_tokens=np.array([3, 2, 1]))
    work = replace(workload(lengths, np.array([0.0, 0.5, 9.0])), service=levels)
    result = simulate([one_at_a_time()], work, "random", Conditions(decision_s=0.25, network_s=0.25))
    rows = request_table(result)  # tokens at 1.5, 2.5 and 3.5 s; at 4.5 and 5.5 s
    assert rows["tokens_on_time"].tolist()[:2] == [1, 0]
    assert np.isnan(rows["tokens_on_time"][2])
    assert rows["class"].tolist() == ["real-time", "best-effort", "real-time"]
    report = summary(result, weights=GainWeights(by_priority={1: 3.0}))
    assert report["tdg_ratio"] == pytest.approx(2 * 1 / (2 * 3 + 3 * 2))
    assert report["num_with_targets"] == 2
    assert report["worst_ttft_over_target"] == pytest.approx(2.0)
    assert "tdg_ratio" not in summary(replace(result, work=replace(work, service=None)))


@pytest.mark.parametrize("batcher", ["vllm_v1", "density", "sarathi_priority"])
def test_a_cluster_of_one_attains_what_its_engine_attains(batcher: str) -> None:
    """One instance without delays serves a mix as its engine does, also with more requests than it has slots at first."""
    mix = mix_from([
        {"name": "tight", "share": 2, "ttft_slo_s": 0.5, "tpot_slo_s": 0.03, "weight": 2.0},
        {"name": "loose", "share": 1, "priority": 1, "class": "best-effort", "ttft_slo_s": 8.0, "tpot_slo_s": 0.06},
        {"name": "first", "share": 1, "ttft_slo_s": 4.0},
        {"name": "none", "share": 1},
    ])  # fmt: skip
    settings = config(batcher=batcher, scheduling_policy="priority" if batcher == "vllm_v1" else "fcfs")
    work = mixed_workload(poisson(300, 40.0), mix, 3)
    conditions = Conditions(decision_s=0.0, network_s=0.0)
    result = simulate([InstanceSpec(config=settings, step_time=A30)], work, "random", conditions)
    requests, _ = mixed([request(work, number) for number in range(len(work))], mix, 3)
    outcomes = replay(settings, A30, requests)
    counted = [-1 if outcome.tokens_on_time is None else outcome.tokens_on_time for outcome in outcomes]
    assert np.asarray(result.outcomes.tokens_on_time).tolist() == counted
    report = attainment_report(served_requests(requests, outcomes))
    ours = summary(result)
    assert 0.02 < report["tdg_ratio"] < 0.98
    for name in ("tdg_ratio", "slo_attained", "deadline_attained", "worst_ttft_over_target"):
        assert ours[name] == pytest.approx(report[name])
    for group in ("by_priority", "by_class", "by_tier"):
        assert set(ours[group]) == set(report[group])
        for value, part in report[group].items():
            assert {name: ours[group][value][name] for name in part} == pytest.approx(part)
    assert set(ours["by_mix"]) == {"tight", "loose", "first", "none"}


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
