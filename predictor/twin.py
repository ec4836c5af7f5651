"""Former names of `predictor.engine_replica`, for callers that have not been renamed yet."""

from __future__ import annotations

from predictor.engine_replica import EngineReplica, ReportedContents, ReportedState, ReportedStep

__all__ = ["Shown", "ShownContents", "ShownStep", "Twin"]

Twin, Shown, ShownStep, ShownContents = EngineReplica, ReportedState, ReportedStep, ReportedContents
