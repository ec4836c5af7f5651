"""A request to be placed, and the place that was found for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from predictor.forecast_result import Forecast
from protos.block.v1 import common_pb2
from scheduler.candidate_ranking import Candidate
from scheduler.unranked import Unranked
from services.scheduler_server.instance_handle import InstanceHandle

BASES = {
    common_pb2.DECISION_BASIS_FORECAST: "forecast",
    common_pb2.DECISION_BASIS_INDICATORS: "indicators",
    common_pb2.DECISION_BASIS_BLIND: "blind",
    common_pb2.DECISION_BASIS_LAST_RESORT: "last_resort",
}


@dataclass(slots=True, kw_only=True)
class PlacementRequest:
    """A request to be placed; it is completed on the way with what was found out about it."""

    request: common_pb2.Request
    taken_s: float  # when it came, by the monotonic clock
    prompt: bytes = b""
    policy: str = ""
    excluded: Collection[str] = ()
    dry_run: bool = False
    waited_s: float = 0.0  # before it came
    patience_s: float = math.inf  # how long its caller waits for a decision

    def __post_init__(self) -> None:
        """Remember how old it was."""
        self.waited_s = self.request.waited_s


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where a request goes, and all that was looked at on the way.

    `rest` tells of the others as they were seen; `everybody` of all, with what is known of the others by now.
    """

    policy: str
    chosen: InstanceHandle
    candidate: Candidate
    basis: common_pb2.DecisionBasis.ValueType
    ranking: Sequence[InstanceHandle]
    candidates: Sequence[Candidate]
    rest: Unranked
    num_candidates: int
    everybody: Callable[[], Sequence[Candidate]]
    forecast: Forecast | None = None
    reserved_for_s: float | None = None
    num_conflicts: int = 0
    decision_s: float = 0.0  # without what it was held
    held_s: float = 0.0
