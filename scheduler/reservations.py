"""Requests promised to an instance that its engine has not shown yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from predictor.forecast_result import Forecast
from predictor.request import RequestFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A place for a request until some time, what it was told to expect there, by which policy, and by whom."""

    request: RequestFacts
    until_s: float
    forecast: Forecast | None = None
    policy: str = ""
    holder: str = ""


@dataclass(slots=True, kw_only=True)
class Reservations:
    """Counts promises so that two who decide at once do not send to the same place; each ends by itself.

    Reserving and releasing are idempotent by request id. A promise ends when the engine shows the request, when it is
    released, or when it expires. `version` counts the promises ever made, so that who decided meanwhile can be told.
    """

    most: int = 4096
    version: int = 0
    _held: dict[str, Promise] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many promises are out."""
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        """Tell whether a request has a promise."""
        return request_id in self._held

    @property
    def is_full(self) -> bool:
        """Tell whether as many promises are out as may be."""
        return len(self._held) >= self.most

    def reserve(self, promise: Promise) -> bool:
        """Promise a place, or extend the same promise; tell whether it is a new one."""
        request_id = promise.request.request_id
        new = request_id not in self._held
        if new:
            self.version += 1
        self._held[request_id] = promise
        return new

    def release(self, request_id: str) -> Promise | None:
        """Take a promise back, if there was one."""
        return self._held.pop(request_id, None)

    def shown(self, request_ids: Collection[str]) -> list[Promise]:
        """End the promises that the engine has taken over."""
        return [self._held.pop(request_id) for request_id in request_ids if request_id in self._held]

    def expire(self, now_s: float) -> list[Promise]:
        """End what was promised too long ago."""
        late = [request_id for request_id, promise in self._held.items() if promise.until_s <= now_s]
        return [self._held.pop(request_id) for request_id in late]

    def held(self) -> Mapping[str, Promise]:
        """The promises by request, oldest first."""
        return MappingProxyType(self._held)
