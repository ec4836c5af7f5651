"""What schedulers report about requests that the engine does not report yet: reservations, and lengths of responses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from predictor.engine import Engine
from predictor.lengths import Tag
from predictor.request import RequestFacts

PREFIX = "reserved/"  # keeps the ids of reservations, which are their clients', apart from those of the engine
MAX_LENGTHS = 1 << 16

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


class ReservedRequests:
    """Reserved requests: they are in the engine model, behind those that the engine reports."""

    def __init__(self) -> None:
        """Initialise it without reservations."""
        self._requests: dict[str, RequestFacts] = {}

    def add(self, request: RequestFacts, engine: Engine, now_s: float) -> bool:
        """Add a request that arrives `in_s` from now to the engine model; return whether it is new.

        ValueError where the engine can never serve it.
        """
        if request.request_id in self._requests:
            return False
        reserved = replace(
            request,
            request_id=PREFIX + request.request_id,
            arrival_s=now_s + request.in_s,
            waited_s=request.waited_s + request.in_s,
            in_s=0.0,
        )
        engine.add(reserved)
        self._requests[request.request_id] = reserved
        return True

    def held_s(self, request_id: str) -> float | None:
        """Return how long the blocks of a reserved prefill leg are expected to be held; None where that is unknown."""
        request = self._requests.get(request_id)
        return None if request is None else request.held_s

    def withdraw(self, request_id: str, engine: Engine) -> bool:
        """Remove a request from the engine model; return whether it was there."""
        if self._requests.pop(request_id, None) is None:
            return False
        engine.abort(PREFIX + request_id)
        engine.remove(PREFIX + request_id)
        return True

    def drop(self, request_id: str) -> None:
        """Remove a request while there is no engine model."""
        self._requests.pop(request_id, None)

    def move_to(self, engine: Engine) -> None:
        """Add all reserved requests to a new engine model; those that it can never serve are dropped."""
        for name, request in list(self._requests.items()):
            try:
                engine.add(request)
            except ValueError:
                del self._requests[name]

    def as_reserved(self) -> tuple[RequestFacts, ...]:
        """Return the reserved requests with their clients' ids."""
        return tuple(replace(one, request_id=name) for name, one in self._requests.items())
