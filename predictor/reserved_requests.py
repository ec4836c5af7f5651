"""What schedulers tell of requests that their engine does not show yet: that they come, and how long answers are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from predictor.engine import Engine
from predictor.lengths import Tag
from predictor.request import RequestFacts

PREFIX = "promised/"  # before the ids of promised requests, which are their clients'
MOST_LENGTHS = 1 << 16

Length = tuple[int, Tag | None]  # known tokens, 0 where nothing is certain; else a tag


class LengthLimits:
    """How long answers will be, by their clients' ids; the oldest are forgotten where there are too many."""

    def __init__(self) -> None:
        """Know none."""
        self._told: dict[str, Length] = {}

    def expect(self, request_id: str, *, tokens: int | None, tag: Tag | None) -> None:
        """Learn one, if anything is told of it."""
        if tokens is not None or tag is not None:
            if len(self._told) >= MOST_LENGTHS:
                del self._told[next(iter(self._told))]
            self._told[request_id] = (tokens or 0, tag)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget some."""
        for request_id in request_ids:
            self._told.pop(request_id, None)

    def of(self, request_id: str) -> Length | None:
        """Give one, if it was told."""
        return self._told.get(request_id)

    def as_tags(self) -> dict[str, Tag]:
        """Give all as tags, certain ones too."""
        tags = {name: Tag(median_tokens=tokens) if tokens else tag for name, (tokens, tag) in self._told.items()}
        return {name: tag for name, tag in tags.items() if tag is not None}


class ReservedRequest:
    """Requests that stand in an engine model behind those that the engine shows."""

    def __init__(self) -> None:
        """Promise nothing yet."""
        self._requests: dict[str, RequestFacts] = {}

    def add(self, request: RequestFacts, engine: Engine, now_s: float) -> bool:
        """Let one stand in the model; tell whether it is new. ValueError where the engine could never serve it."""
        if request.request_id in self._requests:
            return False
        mine = replace(request, request_id=PREFIX + request.request_id, arrival_s=now_s + request.in_s, in_s=0.0)
        engine.add(mine)
        self._requests[request.request_id] = mine
        return True

    def withdraw(self, request_id: str, engine: Engine) -> bool:
        """Take one out of the model; tell whether it was there."""
        if self._requests.pop(request_id, None) is None:
            return False
        engine.abort(PREFIX + request_id)
        engine.unplace(PREFIX + request_id)
        return True

    def drop(self, request_id: str) -> None:
        """Forget one while there is no model."""
        self._requests.pop(request_id, None)

    def move_to(self, engine: Engine) -> None:
        """Promise all once more, to an engine that is new; those that it could never serve are dropped."""
        for name, request in list(self._requests.items()):
            try:
                engine.add(request)
            except ValueError:
                del self._requests[name]

    def as_reserved(self) -> tuple[RequestFacts, ...]:
        """Give them under their clients' names."""
        return tuple(replace(one, request_id=name) for name, one in self._requests.items())
