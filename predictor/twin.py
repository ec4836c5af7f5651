"""Former names of `predictor.engine_replica`, for callers that have not been renamed yet."""

from __future__ import annotations

from predictor.engine_replica import EngineReplica as Twin
from predictor.engine_replica import ReportedContents as ShownContents
from predictor.engine_replica import ReportedState as Shown
from predictor.engine_replica import ReportedStep as ShownStep

__all__ = ["Shown", "ShownContents", "ShownStep", "Twin"]
