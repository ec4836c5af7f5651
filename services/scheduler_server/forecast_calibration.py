"""What clients are told to expect, corrected by what became of what others were told."""

from __future__ import annotations

import math

from predictor.forecast_result import Forecast
from protos.block.v1 import common_pb2
from scheduler.calibration import Calibration
from services.rpc.messages import forecast_message
from services.scheduler_server.metrics import SchedulerMetrics

MOST_WAITED_FOR = 1 << 14


class ForecastCalibration:
    """Keeps each forecast, as it was made, until its request ends; a restart only makes it learn anew."""

    def __init__(self, measures: SchedulerMetrics) -> None:
        """Expect nothing."""
        self._measures = measures
        self._calibration = Calibration()
        self._made: dict[str, tuple[Forecast, float]] = {}  # and the pace that its instance foretold steps at

    def told(self, request_id: str, forecast: Forecast, pace: float) -> common_pb2.Forecast:
        """Keep a forecast, and say what to expect really; `pace` is its instance's real over predicted step time."""
        if len(self._made) >= MOST_WAITED_FOR:
            del self._made[next(iter(self._made))]
        self._made[request_id] = forecast, pace
        return forecast_message(self._calibration.corrected(forecast))

    def ended(self, instance_id: str, outcome: common_pb2.Outcome, pace: float, *, completed: bool) -> None:
        """Learn from an answer that came to its end, and its instance's pace by now; forget the others."""
        made = self._made.pop(outcome.request_id, None)
        if made is None or not completed:
            return
        forecast, pace_then = made
        ttft_s = outcome.ttft_s if outcome.HasField("ttft_s") else None
        e2e_s = outcome.e2e_s if outcome.HasField("e2e_s") else None
        self._calibration.observe(forecast, ttft_s, e2e_s, pace / pace_then)
        if e2e_s and math.isfinite(forecast.e2e_s):
            self._measures.forecast_error.labels(instance_id).observe(abs(forecast.e2e_s - e2e_s) / e2e_s)
