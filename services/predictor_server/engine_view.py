"""What a sidecar knows of its engine at a moment, wherever it knows it from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from predictor.engine import Engine
from predictor.forecast import Forecaster
from predictor.profile import NO_TRANSIT, Transit
from predictor.request import Request
from predictor.reserved_requests import LengthLimits
from predictor.snapshot import Snapshot
from protos.block.v1 import common_pb2


class DownError(Exception):
    """The engine does not run, or not yet, as far as can be seen; `state` says which."""

    def __init__(self, message: str, state: common_pb2.InstanceState.ValueType) -> None:
        """Keep the state beside the message."""
        super().__init__(message)
        self.state = state


@dataclass(slots=True, kw_only=True)
class EngineView:
    """An engine model that stands as the engine does, promised requests included, at `now_s` on the engine's clock.

    `clock_rate` is engine seconds per second; `serial` changes whenever the picture does; `late_s` tells by how many
    seconds a step under way has outlasted its forecast; `transit` is what requests need to the engine's loop and back.
    `counters` are indicators that only the engine can tell.
    """

    engine: Engine
    forecaster: Forecaster
    now_s: float
    clock_rate: float
    age_s: float
    late_s: float
    serial: int
    transit: Transit = NO_TRANSIT
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def comes_s(self) -> float:
        """When a request that is sent now will be in the engine's loop, on the engine's clock."""
        return self.now_s + self.transit.inward_s * self.clock_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of a request on the engine; spans are in seconds of the wall clock."""

    request_id: str  # as its client called it
    output_tokens: int
    ttft_s: float | None
    e2e_s: float | None
    completed: bool  # and neither aborted nor failed


class EngineSource(Protocol):
    """Where a sidecar's picture of its engine comes from."""

    kind: common_pb2.StateSource.ValueType
    lengths: LengthLimits  # of requests that the engine has not shown yet, or shows without

    def look(self) -> EngineView:
        """Bring the picture up to date; DownError where there is nothing to be seen."""

    def snapshot(self) -> Snapshot:
        """Write down what is to be seen, promised requests included; DownError as in `look`."""

    def promise(self, request: Request) -> None:
        """Let a request that the engine has not shown yet stand in the picture; ValueError where it never could."""

    def withdraw(self, request_id: str) -> None:
        """Take such a request out of the picture."""

    def newly_shown(self) -> Sequence[str]:
        """Which requests the engine has shown for the first time since this was last asked."""

    def newly_ended(self) -> Sequence[Ended]:
        """Which requests have ended since this was last asked."""

    def close(self) -> None:
        """Let go of everything."""
