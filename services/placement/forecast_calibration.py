"""Forecasts that clients get, corrected by how earlier forecasts compared with their outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable

from predictor.forecast_result import Forecast
from protos.block.v1 import common_pb2
from scheduler.calibration import Calibration
from scheduler.placement import Placement
from services.placement.listeners import COMPLETED, PlacementListener
from services.placement.metrics import SchedulerMetrics
from services.rpc.messages import forecast_message

MAX_PENDING = 1 << 14


class ForecastCalibration(PlacementListener):
    """Keeps every forecast, as it was made, until its request ends; a restart only makes it learn again."""

    def __init__(self, metrics: SchedulerMetrics, pace_of: Callable[[str], float | None]) -> None:
        """Start without corrections; `pace_of` gives an instance's ratio of real to predicted step time, if known."""
        self._metrics = metrics
        self._pace_of = pace_of
        self._calibration = Calibration()
        self._pending: dict[str, tuple[Forecast, float]] = {}  # with the pace at that time

    def on_placement(self, request: common_pb2.Request, placement: Placement, message: common_pb2.Decision) -> None:
        """Keep a forecast, and correct the one that the client gets."""
        forecast = placement.forecast
        if forecast is None:
            return
        if len(self._pending) >= MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[request.request_id] = forecast, self._pace_of(placement.instance_id) or 1.0
        message.forecast.CopyFrom(forecast_message(self._calibration.corrected(forecast)))

    def on_outcome(self, outcome: common_pb2.Outcome) -> None:
        """Learn from a completed answer; drop the forecasts of others."""
        pending = self._pending.pop(outcome.request_id, None)
        if pending is None or outcome.finish_reason not in COMPLETED:
            return
        forecast, pace_before = pending
        ttft_s = outcome.ttft_s if outcome.HasField("ttft_s") else None
        e2e_s = outcome.e2e_s if outcome.HasField("e2e_s") else None
        pace = self._pace_of(outcome.instance_id) or pace_before
        self._calibration.observe(forecast, ttft_s, e2e_s, pace / pace_before)
        if e2e_s and math.isfinite(forecast.e2e_s):
            error = abs(forecast.e2e_s - e2e_s) / e2e_s
            self._metrics.forecast_error.labels(outcome.instance_id).observe(error)
