"""The last decisions, for those who ask why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from protos.block.v1 import common_pb2
from scheduler.candidate_ranking import Candidate
from scheduler.unranked import Unranked
from services.rpc.errors import UnknownNameError
from services.scheduler_server.explanation import candidate_message
from services.scheduler_server.placement_request import Placement

MOST_DECISIONS = 4096
MOST_CANDIDATES = 20_000  # of all that is remembered: a large fleet has fewer decisions remembered
REST_FOR_ONE = 16  # candidates in columns take as much room as one by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision, those that it looked at, and the rest, as it saw them."""

    decision: common_pb2.Decision
    candidates: Sequence[Candidate]
    rest: Unranked

    def __len__(self) -> int:
        """How much room it takes, in candidates."""
        return len(self.candidates) + len(self.rest) // REST_FOR_ONE


class DecisionLog:
    """Remembers as much as fits; the oldest go first."""

    def __init__(self, most_decisions: int = MOST_DECISIONS, most_candidates: int = MOST_CANDIDATES) -> None:
        """Remember nothing yet."""
        self._most_decisions = most_decisions
        self._most_candidates = most_candidates
        self._decided: dict[str, Decided] = {}
        self._num_candidates = 0

    def keep(self, decision: common_pb2.Decision, placement: Placement) -> None:
        """Remember one; of a request that is decided about again, the last one."""
        self._forget(decision.request_id)
        decided = Decided(decision=decision, candidates=placement.candidates, rest=placement.rest)
        self._decided[decision.request_id] = decided
        self._num_candidates += len(decided)
        while len(self._decided) > self._most_decisions or (
            self._num_candidates > self._most_candidates and len(self._decided) > 1
        ):
            self._forget(next(iter(self._decided)))

    def explained(self, request_id: str) -> common_pb2.Decision:
        """Tell one with its candidates; UnknownNameError where it was not made here, or long ago."""
        decided = self._decided.get(request_id)
        if decided is None:
            raise UnknownNameError(f"request_id: {request_id!r} is none of the last {len(self._decided)} decided here")
        decision = common_pb2.Decision()
        decision.CopyFrom(decided.decision)
        if not decision.candidates:
            names = {one.instance_id for one in decided.candidates}
            everybody = chain(decided.candidates, decided.rest.candidates(names))
            decision.candidates.extend(candidate_message(one, decision.basis) for one in everybody)
        return decision

    def _forget(self, request_id: str) -> None:
        decided = self._decided.pop(request_id, None)
        if decided is not None:
            self._num_candidates -= len(decided)
