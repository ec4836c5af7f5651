"""Forecasts that end as soon as it is known which deadlines are kept agree with forecasts simulated to the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from predictor.forecast_result import ALL_KEPT, FIRST_TOKEN, OTHERS_KEPT, OTHERS_KEPT_AND_START, TO_THE_END
from simulator import forecast_kernels
from simulator.assembly import simulate, simulation
from simulator.scenario import Scenario
from tests.simulator.test_promises import AGENT, BATCH, CAPACITY, CHAT, ENGINE, cluster

UNTIL = 7  # the position among the arguments of a forecast; the next one is the least slack
MIN_SLACK_S = 0.5
WAYS = ((ALL_KEPT, 0.0), (OTHERS_KEPT, 0.0), (OTHERS_KEPT_AND_START, MIN_SLACK_S), (TO_THE_END, 0.0))
MIX = [{**one, "share": 3} for one in (CHAT, AGENT, BATCH)]


class Verdicts:
    """Repeat every forecast with each rule for its end, compare the results, and count the cases."""

    def __init__(self, forecast: Callable[..., None]) -> None:
        """Compare the results of this function."""
        self.seen: Counter[str] = Counter()
        self._forecast = forecast

    def __call__(self, *arguments: Any) -> None:
        """Compare, and return the whole results."""
        results = arguments[-1]
        made = {}
        for until, min_slack_s in WAYS:
            self._forecast(*arguments[:UNTIL], until, min_slack_s, *arguments[UNTIL + 2 :])
            made[until, min_slack_s] = results.copy()
        whole, verdict = made[TO_THE_END, 0.0], made[ALL_KEPT, 0.0]
        harms = harmful(whole)
        self._compare(harmful(made[OTHERS_KEPT, 0.0]), harms, whole)
        with_slack = made[OTHERS_KEPT_AND_START, MIN_SLACK_S]
        leaves_slack = ~harms & (whole["least_slack_s"] >= MIN_SLACK_S)
        found = ~harmful(with_slack) & (with_slack["least_slack_s"] >= MIN_SLACK_S)
        self._compare(found, leaves_slack, whole)
        starts = found & leaves_slack & (whole["scheduled_s"] < np.inf)
        np.testing.assert_allclose(with_slack["scheduled_s"][starts], whole["scheduled_s"][starts], rtol=0, atol=1e-9)
        harms |= whole["num_preemptions"] > 0
        kept = (whole["attained"] > 0) & ~harms
        ours = (verdict["attained"] > 0) & ~harmful(verdict) & (verdict["num_preemptions"] == 0)
        self._compare(ours, kept, whole)
        kept &= ours
        np.testing.assert_allclose(verdict["scheduled_s"][kept], whole["scheduled_s"][kept], rtol=0, atol=1e-9)
        if np.isnan(arguments[1].facts[arguments[3]].ttft_slo_s):
            kept[:] = False  # without a deadline it is not known when a first token comes
        np.testing.assert_allclose(verdict["first_token_s"][kept], whole["first_token_s"][kept], rtol=0, atol=1e-9)
        assert not (verdict["finished_s"][whole["finished_s"] < np.inf] == np.inf).any()
        self.seen.update({
            "forecasts": len(results),
            "kept": int(kept.sum()),
            "own missed": int((whole["attained"] == 0).sum()),
            "others missed": int((whole["others_missed"] > 0).sum()),
            "others preempted": int((whole["others_preempted"] > 0).sum()),
            "ended early": int(np.isnan(verdict["finished_s"]).sum()),
            "started": int((starts & np.isnan(with_slack["finished_s"])).sum()),
            "little slack": int((~harmful(whole) & ~leaves_slack).sum()),
        })  # fmt: skip

    def _compare(self, found: np.ndarray, expected: np.ndarray, whole: np.ndarray) -> None:
        """Allow a difference only where requests are preempted, maybe after the last deadline, and none is late."""
        differ = found != expected
        self.seen["preempted later"] += int(differ.sum())
        assert ((whole["others_preempted"] != 0) | (whole["num_preemptions"] > 0))[differ].all()
        assert (whole["others_missed"][differ] == 0).all()


def harmful(results: np.ndarray) -> np.ndarray:
    """Return where others would miss a deadline, or be preempted."""
    found: np.ndarray = (results["others_missed"] > 0) | (results["others_preempted"] > 0)
    return found


def seen_in(monkeypatch: pytest.MonkeyPatch, scenario: Scenario, rate: float, policy: str) -> Counter[str]:
    """Compare all forecasts of a run."""
    verdicts = Verdicts(forecast_kernels.forecast_directly)
    monkeypatch.setattr(forecast_kernels, "forecast_directly", verdicts)
    simulate(scenario.instance_specs(), scenario.workload(rate, 0), policy, scenario.conditions)
    return verdicts.seen


@pytest.mark.parametrize("policy", ["slo: backlog = 1", "expr: others_missed - predicted_attained"])
@pytest.mark.parametrize(
    "engine",
    [
        {"batcher": "decode_then_edf"},
        {"batcher": "decode_then_edf", "num_gpu_blocks": 401, "async_scheduling": True},
        {"batcher": "vllm_v1", "num_gpu_blocks": 401},
        {"batcher": "deadline_forecast"},
    ],
    ids=["decode_then_edf", "few blocks, async", "vllm_v1, few blocks", "deadline_forecast"],
)
def test_they_agree(monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], policy: str) -> None:
    """Under overload, with best effort among the requests, with and without shortage of KV blocks."""
    scenario = cluster(MIX, 150, deadline_margin_s=0.02).changed(instances={"engine": {**ENGINE, **engine}})
    seen = seen_in(monkeypatch, scenario, 4.0 * CAPACITY, policy)
    refused = seen["own missed"] + seen["others missed"] + seen["others preempted"]
    assert min(seen["kept"], refused, seen["ended early"], seen["little slack"]) > 10, seen
    assert seen["started"] > 0, seen
    assert seen["preempted later"] <= 0.02 * seen["forecasts"], seen


def test_a_request_without_targets_goes_to_an_idle_instance_at_once() -> None:
    """A policy that holds requests by a limit of their wait in the engine knows when one without deadlines starts."""
    scenario = cluster([{"name": "plain", "share": 1}], 50)
    run = simulate(scenario.instance_specs(), scenario.workload(0.5 * CAPACITY, 0), "slo", scenario.conditions)
    assert (run.decisions.decided_s - run.work.arrival_s).max() < 0.1


def test_goodput_of_a_rule_that_reads_first_tokens_does_not_need_whole_forecasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forecasts until the first token lead to the same placements as whole ones, and their later times are unknown."""
    scenario = cluster(MIX, 150)
    specs, work = scenario.instance_specs(), scenario.workload(2.0 * CAPACITY, 0)
    asked: list[int] = []

    def forecast(*arguments: Any) -> None:
        asked.append(arguments[UNTIL])
        whole_forecast(*arguments)

    whole_forecast = forecast_kernels.forecast_directly
    monkeypatch.setattr(forecast_kernels, "forecast_directly", forecast)
    whole = simulation(specs, work, "block_ttft", scenario.conditions).run()
    assert set(asked) == {TO_THE_END}
    asked.clear()
    short = simulation(specs, work, "block_ttft", scenario.conditions, whole_forecasts=False).run()
    assert set(asked) == {FIRST_TOKEN}
    np.testing.assert_array_equal(short.decisions.instance, whole.decisions.instance)
    np.testing.assert_allclose(short.decisions.predicted_ttft_s, whole.decisions.predicted_ttft_s, rtol=0, atol=1e-9)
    assert np.isnan(short.decisions.predicted_e2e_s).all()
    assert np.isfinite(whole.decisions.predicted_e2e_s).all()
