"""Where a sidecar gets the state of its engine from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from predictor.engine_view import EndedRequest, EngineView
from predictor.request_group import Placeable
from predictor.reserved_requests import ReportedLengths
from predictor.snapshot import Snapshot
from protos.block.v1 import common_pb2


class DownError(Exception):
    """The engine does not run, or its state is not known; `state` is the instance's."""

    def __init__(self, message: str, state: common_pb2.InstanceState.ValueType) -> None:
        """Keep the state beside the message."""
        super().__init__(message)
        self.state = state


class EngineSource(Protocol):
    """Follows one engine: by the state that it exports, or by mirroring its traffic."""

    kind: common_pb2.StateSource.ValueType
    lengths: ReportedLengths  # reported by schedulers

    def refresh(self) -> EngineView:
        """Return the engine's state now; DownError where it is not known."""

    def snapshot(self) -> Snapshot:
        """Return the engine's state as a snapshot, reserved requests included; DownError as in `refresh`."""

    def reserve(self, request: Placeable) -> None:
        """Add a request to the view that has not arrived yet; ValueError where the engine could never serve it."""

    def release(self, request_id: str) -> None:
        """Remove a reserved request from the view."""

    def take_shown(self) -> Sequence[str]:
        """Return the ids of requests that reached the engine since this was last called."""

    def take_ended(self) -> Sequence[EndedRequest]:
        """Return the requests that ended since this was last called."""

    def close(self) -> None:
        """Release all resources."""
