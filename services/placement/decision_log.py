"""The last decisions, kept to explain them on request."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from protos.block.v1 import common_pb2
from scheduler.placement import Placement
from services.placement.decision_message import candidate_messages
from services.placement.listeners import PlacementListener
from services.rpc.errors import UnknownNameError

MAX_CANDIDATES = 20_000  # of all decisions together: with many instances fewer decisions are kept
COLUMNS_PER_CANDIDATE = 16  # instances kept as columns take as much memory as one kept by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDecision:
    """A decision in its wire form, and the placement that explains it."""

    message: common_pb2.Decision
    placement: Placement

    def __len__(self) -> int:
        """Return its size in candidates."""
        num = self.message.num_candidates
        return num if self.placement.forecast is not None else 8 + num // COLUMNS_PER_CANDIDATE


class DecisionLog(PlacementListener):
    """Keeps as many decisions as fit; the oldest are dropped first."""

    def __init__(self, max_decisions: int, max_candidates: int = MAX_CANDIDATES) -> None:
        """Start empty."""
        self._max_decisions = max_decisions
        self._max_candidates = max_candidates
        self._logged: dict[str, LoggedDecision] = {}
        self._num_candidates = 0

    def on_placement(self, request: common_pb2.Request, placement: Placement, message: common_pb2.Decision) -> None:
        """Keep a decision; of a request that is placed again, the last one."""
        self._drop(request.request_id)
        logged = LoggedDecision(message=message, placement=placement)
        self._logged[request.request_id] = logged
        self._num_candidates += len(logged)
        while len(self._logged) > self._max_decisions or (
            self._num_candidates > self._max_candidates and len(self._logged) > 1
        ):
            self._drop(next(iter(self._logged)))

    def explained(self, request_id: str) -> common_pb2.Decision:
        """Return a decision with its candidates; UnknownNameError where it was made elsewhere, or long ago."""
        logged = self._logged.get(request_id)
        if logged is None:
            raise UnknownNameError(f"request_id: {request_id!r} is not among the last {len(self._logged)} decisions")
        decision = common_pb2.Decision()
        decision.CopyFrom(logged.message)
        if not decision.candidates:
            decision.candidates.extend(candidate_messages(logged.placement))
        return decision

    def last(self, num: int) -> list[LoggedDecision]:
        """Return the last decisions, the oldest first."""
        return list(islice(reversed(self._logged.values()), num))[::-1]

    def is_answered_by(self, instance_id: str, request_id: str) -> bool:
        """Return whether the last decision for a request, if it is kept, has an instance answer it."""
        logged = self._logged.get(request_id)
        return logged is not None and logged.message.instance.instance_id == instance_id

    def _drop(self, request_id: str) -> None:
        logged = self._logged.pop(request_id, None)
        if logged is not None:
            self._num_candidates -= len(logged)
