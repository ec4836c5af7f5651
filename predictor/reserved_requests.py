"""What schedulers report about requests that the engine does not report yet: reservations, and lengths of responses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from predictor.engine import Engine
from predictor.lengths import Tag
from predictor.request import RequestFacts
from predictor.request_group import Placeable, RequestGroup, members_of

PREFIX = "reserved/"  # keeps the ids of reservations, which are their clients', apart from those of the engine
MAX_LENGTHS = 1 << 16
SIBLINGS_S = 1.0  # from the first of a group's requests in the engine to the last

Length = tuple[int, Tag | None]  # the known number of tokens, or 0 and a tag


class ReportedLengths:
    """Known or predicted lengths of responses, by the client's request id; beyond a limit the oldest are dropped."""

    def __init__(self) -> None:
        """Initialise it without lengths."""
        self._lengths: dict[str, Length] = {}

    def add(self, request_id: str, *, tokens: int | None, tag: Tag | None) -> None:
        """Add the length of a response, where one is given."""
        if tokens is not None or tag is not None:
            if len(self._lengths) >= MAX_LENGTHS:
                del self._lengths[next(iter(self._lengths))]
            self._lengths[request_id] = (tokens or 0, tag)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Remove the lengths of these requests."""
        for request_id in request_ids:
            self._lengths.pop(request_id, None)

    def of(self, request_id: str) -> Length | None:
        """Return the length of a request's response; None where it is unknown."""
        return self._lengths.get(request_id)

    def as_tags(self) -> dict[str, Tag]:
        """Return all lengths as tags, also the known ones."""
        tags = {name: Tag(median_tokens=tokens) if tokens else tag for name, (tokens, tag) in self._lengths.items()}
        return {name: tag for name, tag in tags.items() if tag is not None}


@dataclass(slots=True)
class ReservedMembers:
    """What is left of a reservation: the engine's requests that it has not shown yet, by their index in the group."""

    left: dict[int, RequestFacts]
    num_sequences: int
    first_shown_s: float = math.inf  # when the engine showed the first of several

    def index_of(self, prompt: int, sequence: int) -> int:
        """Return the index of the request that the engine shows; that of another one where it is not among them."""
        index = prompt * self.num_sequences + sequence
        return index if index in self.left else next(iter(self.left))


class ReservedRequests:
    """Reserved requests: they are in the engine model, behind those that the engine reports.

    The engine shows the requests of a group one by one. Those that it does not show `SIBLINGS_S` after the first are
    dropped: it made fewer of them than were reserved.
    """

    def __init__(self) -> None:
        """Initialise it without reservations."""
        self._requests: dict[str, ReservedMembers] = {}

    def add(self, request: Placeable, engine: Engine, now_s: float) -> bool:
        """Add a request that arrives `in_s` from now to the engine model; return whether it is new.

        ValueError where the engine can never serve it.
        """
        if request.request_id in self._requests:
            return False
        members: dict[int, RequestFacts] = {}
        for index, member in enumerate(members_of(request)):
            reserved = replace(
                member,
                request_id=PREFIX + member.request_id,
                arrival_s=now_s + member.in_s,
                waited_s=member.waited_s + member.in_s,
                in_s=0.0,
            )
            try:
                engine.add(reserved)
            except ValueError:
                _remove(members.values(), engine)
                raise
            members[index] = reserved
        num_sequences = request.num_sequences if isinstance(request, RequestGroup) else 1
        self._requests[request.request_id] = ReservedMembers(members, num_sequences)
        return True

    def held_s(self, request_id: str) -> float | None:
        """Return how long the blocks of a reserved prefill leg are expected to be held; None where that is unknown."""
        request = self._requests.get(request_id)
        return None if request is None else next(iter(request.left.values())).held_s

    def withdraw(self, request_id: str, engine: Engine) -> bool:
        """Remove a request from the engine model; return whether it was there."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        _remove(request.left.values(), engine)
        return True

    def show(self, request_id: str, prompt: int, sequence: int, engine: Engine, at_s: float) -> bool:
        """Remove one of a request's from the engine model, which the engine shows; return whether none is left."""
        request = self._requests.get(request_id)
        if request is None:
            return True
        _remove([request.left.pop(request.index_of(prompt, sequence))], engine)
        request.first_shown_s = min(request.first_shown_s, at_s)
        if request.left:
            return False
        del self._requests[request_id]
        return True

    def drop_unshown(self, engine: Engine, at_s: float) -> list[str]:
        """Remove what the engine has not made of requests that it shows; return their ids."""
        overdue = [name for name, one in self._requests.items() if at_s - one.first_shown_s > SIBLINGS_S]
        for name in overdue:
            self.withdraw(name, engine)
        return overdue

    def drop(self, request_id: str) -> None:
        """Remove a request while there is no engine model."""
        self._requests.pop(request_id, None)

    def move_to(self, engine: Engine) -> None:
        """Add all reserved requests to a new engine model; those that it can never serve are dropped."""
        for name, request in list(self._requests.items()):
            for index, member in list(request.left.items()):
                try:
                    engine.add(member)
                except ValueError:
                    del request.left[index]
            if not request.left:
                del self._requests[name]

    def as_reserved(self) -> tuple[RequestFacts, ...]:
        """Return the reserved requests with their clients' ids, those of groups with their index."""
        return tuple(
            replace(one, request_id=one.request_id.removeprefix(PREFIX))
            for request in self._requests.values()
            for one in request.left.values()
        )


def _remove(requests: Iterable[RequestFacts], engine: Engine) -> None:
    for request in requests:
        engine.abort(request.request_id)
        engine.remove(request.request_id)
