"""The interface of components that follow placements and outcomes: recorder, reports, calibration, decision log."""

from __future__ import annotations

from protos.block.v1 import common_pb2
from scheduler.placement import Placement

COMPLETED = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class PlacementListener:
    """Is called for every placement, outcome and release; it returns at once and never raises."""

    def on_placement(self, request: common_pb2.Request, placement: Placement, message: common_pb2.Decision) -> None:
        """Take a placement and its wire form, which a listener may complete before the caller gets it."""

    def on_outcome(self, outcome: common_pb2.Outcome) -> None:
        """Take the outcome of a request."""

    def on_release(self, request_id: str, instance_id: str) -> None:
        """Take the end of a request whose outcome is unknown."""
