"""Requests that are reserved at an instance and that its engine has not shown yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from predictor.forecast_result import Forecast
from predictor.request_group import Placeable, members_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A request that counts at an instance until a time, its forecast, and the policy and scheduler that chose it."""

    request: Placeable
    until_s: float
    forecast: Forecast | None = None
    policy: str = ""
    holder: str = ""


@dataclass(slots=True, kw_only=True)
class Reservations:
    """The reservations at one instance, so that simultaneous decisions do not all choose it.

    Reserving and releasing are idempotent by request id. A reservation ends when the engine shows the request, when it
    is released, or when it expires. `version` counts the reservations ever made, so that a scheduler that decided by an
    older state can be refused.
    """

    most: int = 4096
    version: int = 0
    _held: dict[str, Reservation] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of reservations."""
        return len(self._held)

    @property
    def num_requests(self) -> int:
        """How many requests engines make of those that are reserved."""
        return sum(len(members_of(one.request)) for one in self._held.values())

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request has a reservation."""
        return request_id in self._held

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of reservations is reached."""
        return len(self._held) >= self.most

    def reserve(self, reservation: Reservation) -> bool:
        """Add a reservation, or extend that of the same request; return whether it is a new one."""
        request_id = reservation.request.request_id
        new = request_id not in self._held
        if new:
            self.version += 1
        self._held[request_id] = reservation
        return new

    def release(self, request_id: str) -> Reservation | None:
        """Remove and return the reservation of a request, if it has one."""
        return self._held.pop(request_id, None)

    def shown(self, request_ids: Collection[str]) -> list[Reservation]:
        """Remove and return the reservations of requests that the engine shows."""
        return [self._held.pop(request_id) for request_id in request_ids if request_id in self._held]

    def expire(self, now_s: float) -> list[Reservation]:
        """Remove and return the reservations that have expired."""
        expired = [name for name, reservation in self._held.items() if reservation.until_s <= now_s]
        return [self._held.pop(request_id) for request_id in expired]

    def held(self) -> Mapping[str, Reservation]:
        """Return the reservations by request id, oldest first."""
        return MappingProxyType(self._held)
