"""The forecasts of a simulated cluster, as the columns that its schedulers read."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from predictor.forecast_kernels import RESULT
from predictor.forecast_result import FIRST_TOKEN, TO_THE_END
from predictor.lengths import quantile_medians
from predictor.request import DECODE, LEGS, PREFILL
from predictor.state import State
from scheduler.columns import Column
from scheduler.intentions import Ask
from scheduler.policy import Policy
from simulator import forecast_kernels
from simulator.fleet import workspace_for
from simulator.fleet_arrays import EngineArrays, Requests

FORECAST_FIELDS = {
    "predicted_ttft_s": "first_token_s",
    "predicted_e2e_s": "finished_s",
    "predicted_queue_s": "scheduled_s",
    "predicted_preemptions": "num_preemptions",
    "others_preempted": "others_preempted",
    "delay_sum_s": "delay_sum_s",
    "delay_worst_s": "delay_worst_s",
    "predicted_attained": "attained",
    "others_missed": "others_missed",
    "gain_before": "gain_before",
    "gain_after": "gain_after",
    "least_slack_s": "least_slack_s",
    "predicted_unmeasured": "unmeasured",
}

AVERAGED = {"predicted_attained", "others_missed", "gain_before", "gain_after"}  # over a request's lengths


class SimulatedForecasts:
    """Forecasts requests on the engines of a cluster as their sidecars would."""

    def __init__(
        self, policy: Policy, num_instances: int, *, deadline_margin_s: float, network_s: float, whole: bool = True
    ) -> None:
        """Start without a workspace; only the columns that the policy reads are made.

        A request arrives `network_s` from now, behind all that were reserved before it.
        With `whole` forecasts also have the times that come after the last one that the policy reads, for reports.
        """
        self.results = np.zeros(num_instances, RESULT).view(np.recarray)  # of the last forecast, by candidate
        self._deadline_margin_s, self._network_s, self._whole = deadline_margin_s, network_s, whole
        needed = {name for part in policy.parts if part.needs_forecast for name in part.forecast_columns}
        needed.add("predicted_e2e_s")
        self._needs_tpot = "predicted_tpot_s" in needed
        self._num_quantiles = policy.length_quantiles  # lengths with which each forecast is made
        self._columns = {name: self.results[column] for name, column in FORECAST_FIELDS.items() if name in needed}
        self._workspace: State | None = None
        self._fleet: EngineArrays | None = None  # that the workspace is made for

    def forecast(
        self, fleet: EngineArrays, requests: Requests, ask: Ask, number: int, now_s: float
    ) -> dict[str, Column]:
        """Forecast a request, or a leg of it, on some instances, with each of its lengths, the middle one last."""
        facts, num = requests.facts[number], self._num_quantiles
        log_median, spread = facts.log_median, facts.spread
        if num == 1 or ask.leg == PREFILL or not spread > 0 or math.isnan(log_median):
            return self._forecast_once(fleet, requests, ask, number, now_s)
        medians = quantile_medians(math.exp(log_median), spread, num)
        sums: dict[str, Column] = {}
        facts.spread = 0.0
        for part in (*range(num // 2), *range(num // 2 + 1, num), num // 2):
            facts.log_median = math.log(medians[part]) if part != num // 2 else log_median
            columns = self._forecast_once(fleet, requests, ask, number, now_s)
            for name in AVERAGED & columns.keys():
                sums[name] = sums.get(name, 0.0) + columns[name]
        facts.spread = spread
        return {**columns, **{name: total / num for name, total in sums.items()}}

    def _forecast_once(
        self, fleet: EngineArrays, requests: Requests, ask: Ask, number: int, now_s: float
    ) -> dict[str, Column]:
        """Forecast in one call of compiled code."""
        among, leg = ask.candidates, LEGS.index(ask.leg)
        rows = np.arange(len(among)) if among.rows is None else among.rows
        num = len(rows)
        results = self.results[:num]
        facts = requests.facts[number]
        ttft_slo_s = facts.ttft_slo_s
        facts.ttft_slo_s = ttft_slo_s - self._deadline_margin_s
        until = TO_THE_END if self._whole and ask.until == FIRST_TOKEN else ask.until
        in_s = ask.in_s if ask.leg == DECODE else self._network_s  # a decode leg arrives when its prefill has ended
        forecast_kernels.forecast_directly(
            fleet, requests, self._workspace_of(fleet), number, rows, now_s, ask.with_delays, until,
            ask.min_slack_s, leg, in_s, results,
        )  # fmt: skip
        facts.ttft_slo_s = ttft_slo_s
        columns = {name: np.asarray(column[:num], np.float64) for name, column in self._columns.items()}
        if self._network_s > 0 and ask.leg != DECODE and "predicted_queue_s" in columns:
            columns["predicted_queue_s"] = columns["predicted_queue_s"] - in_s  # in the engine
        if self._needs_tpot:
            columns["predicted_tpot_s"] = (results["finished_s"] - results["first_token_s"]) / np.maximum(
                1, results["output_tokens"] - 1
            )
        return columns

    def forecast_drain(self, fleet: EngineArrays, now_s: float, drained_s: npt.NDArray[np.float64]) -> None:
        """Forecast for each engine when all its requests have finished."""
        forecast_kernels.forecast_drain_directly(fleet, self._workspace_of(fleet), now_s, drained_s)

    def _workspace_of(self, fleet: EngineArrays) -> State:
        if self._workspace is None or self._fleet is not fleet:
            self._workspace, self._fleet = workspace_for(fleet), fleet
        return self._workspace
