"""How groups of requests end: the ends of their requests joined, as their clients see one request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from predictor.engine_view import EndedRequest

MAX_GROUPS = 4096  # that have not ended; the oldest are dropped


@dataclass(slots=True)
class OpenGroup:
    """A group that has not ended: how many of its requests are left, and how the others ended."""

    num_left: int
    ended: EndedRequest | None = None


class GroupEnds:
    """Joins the ends of the requests of each group; other requests pass."""

    def __init__(self) -> None:
        """Start without groups."""
        self._groups: dict[str, OpenGroup] = {}

    def __len__(self) -> int:
        """Return the number of groups that have not ended."""
        return len(self._groups)

    def expect(self, request_id: str, num_requests: int) -> None:
        """Expect so many ends of a client's request; one needs no joining."""
        if num_requests == 1 or request_id in self._groups:
            return
        if len(self._groups) >= MAX_GROUPS:
            del self._groups[next(iter(self._groups))]
        self._groups[request_id] = OpenGroup(num_requests)

    def forget(self, request_id: str) -> None:
        """Expect no more ends of a client's request, as it never reaches the engine."""
        self._groups.pop(request_id, None)

    def joined(self, ended: Iterable[EndedRequest]) -> list[EndedRequest]:
        """Return the client's requests that have ended by now."""
        found = []
        for one in ended:
            group = self._groups.get(one.request_id)
            if group is None:
                found.append(one)
                continue
            group.num_left -= 1
            group.ended = one if group.ended is None else _both(group.ended, one)
            if group.num_left <= 0:
                del self._groups[one.request_id]
                found.append(group.ended)
        return found


def _both(one: EndedRequest, other: EndedRequest) -> EndedRequest:
    """Join two ends: from the first token of either to the last of both."""
    firsts = [end.ttft_s for end in (one, other) if end.ttft_s is not None]
    lasts = [end.e2e_s for end in (one, other) if end.e2e_s is not None]
    return replace(
        one,
        output_tokens=one.output_tokens + other.output_tokens,
        ttft_s=min(firsts, default=None),
        e2e_s=max(lasts, default=None),
        completed=one.completed and other.completed,
        num_requests=one.num_requests + other.num_requests,
    )
