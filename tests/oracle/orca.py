"""Orca's Algorithm 1 (OSDI 22): every iteration selects requests, and memory is reserved for the longest response."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.oracle.engine import Engine, EngineSettings, Request, Seconds, Step, one_second, replay


def longest(engine: Engine, request: Request) -> int:
    """Return the maximum number of tokens of a request (`max_tokens` of the paper)."""
    return int(min(request.prompt_tokens + request.max_tokens, engine.settings["max_model_len"]))


def select_new(engine: Engine) -> None:
    """Admit requests in order until seats, memory or, except for the first one, budget run out."""
    any_admitted = False
    while engine.waiting and engine.has_seat:
        request = engine.waiting[0]
        if engine.blocks_for(longest(engine, request)) > engine.free_blocks:
            return
        if request.prompt_tokens > engine.budget and any_admitted:
            return
        engine.admit(request, request.prompt_tokens, longest(engine, request))
        any_admitted = True


def schedule(engine: Engine) -> None:
    """Decode all running requests, whose memory is reserved; then admit new ones."""
    for request in engine.running:
        engine.go_on(request, 1, request.num_tokens)
    select_new(engine)


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run an engine on a virtual clock, and yield each step right after its planning."""
    return replay(schedule, settings, requests, seconds=seconds)
