"""Candidates for two legs: a request's prefill leg on one instance, and its decode leg or all of it on others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from predictor.forecast_result import Forecast
from predictor.request import DECODE, SERVE
from scheduler.candidate import FORECAST_FIELDS, CandidateStatus
from scheduler.candidates import Candidates, Rows
from scheduler.columns import Column
from scheduler.comparison import NONE, Comparison, rows_of
from scheduler.intentions import NO_ANSWER, Answer

SUMMED = ("delay_sum_s", "others_preempted", "others_missed", "gain_before", "gain_after")  # over both legs
PREDICTED = FORECAST_FIELDS.keys() - {"prefix_hit_tokens"}
GONE = (CandidateStatus.DOWN, CandidateStatus.STOPPED, CandidateStatus.DRAINING)


class PairComparison(Comparison):
    """What an attempt has found for a request that may have two legs.

    An instance may be compared twice: for the whole request, and for the decode leg that follows the prefill leg.
    """

    prefill: Comparison | None = None  # that chose the instance of the prefill leg; None: the request has one leg
    is_decode: npt.NDArray[np.bool_] | None = None  # by position
    to_decode: Candidates | None = None  # those that are asked about a decode leg only
    end_s = arrives_s = 0.0  # until the prefill leg ends, and until the decode leg arrives

    # Which of the compared are for a decode leg.

    def arrives_after(self, prefill: Comparison, hand_over_s: float) -> bool:
        """Return whether a prefill leg ends on its chosen instance, and keep when the decode leg arrives then."""
        end_s = prefill.predicted("predicted_e2e_s")
        if end_s is None or not math.isfinite(end_s):
            return False
        self.end_s, self.arrives_s = end_s, end_s + hand_over_s
        return True

    def decode_only(self) -> None:
        """Compare all instances for the decode leg from now on."""
        self.leg, self.in_s = DECODE, self.arrives_s

    def is_decode_at(self, position: int) -> bool:
        """Whether an instance is compared for the decode leg."""
        if position == NONE or self.prefill is None:
            return False
        return self.leg == DECODE or (self.is_decode is not None and bool(self.is_decode[position]))

    @property
    def chose_pair(self) -> bool:
        """Whether the chosen instance gets a decode leg."""
        return self.is_decode_at(self.position)

    def leg_at(self, position: int) -> tuple[str, float]:
        """Return the leg of the instance at a position, and when it arrives there; -1 for one that is not compared."""
        return (DECODE, self.arrives_s) if self.is_decode_at(position) else (SERVE, 0.0)

    def refused(self, admits: npt.NDArray[np.bool_], rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of the compared admit neither the decode leg nor the whole request."""
        return ~np.isin(rows, rows[admits])

    # Forecasts of both.

    def decode_candidates(self) -> Candidates:
        """Return the candidates that are asked about the decode leg: those for the whole request, or others."""
        candidates = self.compared if self.to_decode is None else self.to_decode
        assert candidates is not None
        return candidates

    def take_decode(self, asked: Candidates, answers: Mapping[str, Answer], now_s: float) -> None:
        """Compare decode legs and whole requests; an instance that was late the second time may serve the latter."""
        assert self.compared is not None
        known, kept, forecasts = set(self.compared.instance_ids), [], []
        for position, name in enumerate(asked.instance_ids):
            answer = answers.get(name, NO_ANSWER)
            if answer.status is CandidateStatus.FORECAST:
                kept.append(position)
                forecasts.append(answer)
            elif name not in known or answer.status in GONE:
                self.set_aside(name, answer, now_s)
        decode = asked if len(kept) == len(asked) else asked.only(np.array(kept, np.intp))
        self.compare_both(decode, forecasts)

    def compare_both(self, decode: Candidates, forecasts: list[Answer]) -> None:
        """Compare whole requests and decode legs together; of equal ones the whole request wins."""
        whole = self.compared
        assert whole is not None
        self.is_decode = np.arange(len(whole) + len(decode)) >= len(whole)
        columns = {
            name: np.concatenate((column, decode.columns[name]))
            for name, column in whole.columns.items()
            if name in decode.columns
        }
        self.compared = replace(
            whole,
            rows=np.concatenate((rows_of(whole), rows_of(decode))),
            columns=columns if len(whole) else dict(decode.columns),  # no instance was asked about whole requests
        )
        if self.forecasts is not None:
            self.forecasts = [*self.forecasts, *forecasts]
        self.scores = None

    def complete(self, compared: Candidates) -> None:
        """Count what the prefill leg does to others, and how long it waits, for every decode leg.

        A prefix that is cached where a request is only decoded saves no prefill.
        """
        prefill, is_decode = self.prefill, self.is_decode
        if self.leg == DECODE:
            is_decode = np.ones(len(compared), np.bool_)
        if prefill is None or is_decode is None:
            return
        columns = compared.columns
        for name in (*SUMMED, "delay_worst_s", "least_slack_s", "predicted_queue_s"):
            value = prefill.predicted(name) if name in columns else None
            if value is not None:
                columns[name] = np.where(is_decode, self._of_both(name, columns[name], value), columns[name])
        if "prefix_hit_tokens" in columns:
            columns["cached_prefill_s"] = np.where(is_decode, 0.0, compared["cached_prefill_s"])

    def _of_both(self, name: str, column: Column, value: float) -> Column:
        """Return an indicator of both legs, by that of every decode leg and that of the prefill leg."""
        if name == "delay_worst_s":
            return np.maximum(column, value)
        if name == "least_slack_s":
            return np.minimum(column, value)
        if name == "predicted_queue_s":
            return value + np.maximum(column - self.arrives_s, 0.0)
        return column + value

    # The chosen pair.

    def blocks_held_s(self) -> float | None:
        """Return for how long the prefill instance is predicted to hold the KV blocks, if that is known."""
        forecast = self.chosen_forecast
        if forecast is None or forecast.fetched_s is None or not math.isfinite(forecast.fetched_s):
            return None
        return max(0.0, forecast.fetched_s - self.end_s)

    def decode_forecast(self, prefill: Forecast | None) -> Forecast | None:
        """Return the forecast of the decode leg, which a later prefill leg than it was made for postpones."""
        forecast = self.chosen_forecast
        if forecast is None or prefill is None:
            return forecast
        seconds = prefill.e2e_s - self.end_s
        if not 0 < seconds < math.inf:
            return forecast
        return replace(
            forecast,
            queue_s=forecast.queue_s + seconds,
            ttft_s=forecast.ttft_s + seconds,
            e2e_s=forecast.e2e_s + seconds,
            fetched_s=None if forecast.fetched_s is None else forecast.fetched_s + seconds,
        )
