"""Requests on their way to a mirrored engine, as its proxy reads them."""

from __future__ import annotations

from dataclasses import dataclass

from predictor.lengths import Tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request on its way to the engine, as far as it can be read."""

    request_id: str  # as its client calls it
    prompt_tokens: int
    max_tokens: int | None = None
    known_tokens: int | None = None
    tag: Tag | None = None
    priority: int = 0
    streamed: bool = False


@dataclass(slots=True, kw_only=True)
class InFlightRequest:
    """A request that is being proxied."""

    arrival: Arrival
    arrived_s: float  # monotonic
    first_s: float | None = None
