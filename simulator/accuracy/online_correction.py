"""Forecasts at arrival, corrected as schedulers correct those that clients get: by requests that have ended by then."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from predictor.forecast_result import Forecast
from scheduler.calibration import Calibration
from simulator.accuracy.replayed_window import RequestTimes


def corrected(forecasts: RequestTimes, truth: RequestTimes) -> RequestTimes:
    """Return forecasts, each corrected by the errors of those whose requests had ended when it was made."""
    calibration = Calibration()
    made = [_forecast(forecasts, place) for place in range(len(forecasts))]
    ended = iter(np.argsort(truth.end_s, kind="stable").tolist())
    following = next(ended, None)
    ttft_s, e2e_s = forecasts.ttft_s.copy(), forecasts.e2e_s.copy()
    for place, at_s in enumerate(truth.arrival_s.tolist()):
        while following is not None and truth.end_s[following] < at_s:
            calibration.observe(made[following], _known(truth.ttft_s[following]), _known(truth.e2e_s[following]))
            following = next(ended, None)
        better = calibration.corrected(made[place])
        ttft_s[place], e2e_s[place] = better.ttft_s, better.e2e_s
    return replace(forecasts, ttft_s=ttft_s, e2e_s=e2e_s)


def _forecast(times: RequestTimes, place: int) -> Forecast:
    ttft_s, e2e_s = float(times.ttft_s[place]), float(times.e2e_s[place])
    tokens = int(times.output_tokens[place])
    return Forecast(
        request_id=str(place),
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        tpot_s=(e2e_s - ttft_s) / max(1, tokens - 1),
        queue_s=float(times.queue_s[place]),
        output_tokens=tokens,
        num_preemptions=0,
        prefix_hit_tokens=0,
    )


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else float(seconds)
