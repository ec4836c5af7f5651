"""Requests promised to an instance that its engine has not shown yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from predictor.request import Request


@dataclass(slots=True, kw_only=True)
class Reservations:
    """Counts promises so that two who decide at once do not send to the same place; each ends by itself.

    Reserving and releasing are idempotent by request id. A promise ends when the engine shows the request, when it is
    released, or when it expires.
    """

    expiry_s: float = 10.0
    most: int = 4096
    _held: dict[str, tuple[Request, float]] = field(default_factory=dict)

    def reserve(self, request: Request, now_s: float) -> bool:
        """Promise a place; False when too many promises are out."""
        self.expire(now_s)
        if request.request_id not in self._held and len(self._held) >= self.most:
            return False
        self._held[request.request_id] = (request, now_s + self.expiry_s)
        return True

    def release(self, request_id: str) -> bool:
        """Take a promise back; False when there was none."""
        return self._held.pop(request_id, None) is not None

    def shown(self, request_ids: set[str]) -> None:
        """Drop the promises that the engine has taken over."""
        for request_id in self._held.keys() & request_ids:
            del self._held[request_id]

    def expire(self, now_s: float) -> int:
        """Drop what was promised too long ago; return how many."""
        late = [request_id for request_id, (_, until_s) in self._held.items() if until_s <= now_s]
        for request_id in late:
            del self._held[request_id]
        return len(late)

    def held(self) -> list[Request]:
        """The promised requests, oldest promise first."""
        return [request for request, _ in self._held.values()]

    def __len__(self) -> int:
        """How many promises are out."""
        return len(self._held)
