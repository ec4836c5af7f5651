"""Orca's Algorithm 1 (OSDI 22): every iteration selects anew, and memory is reserved for the longest answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.oracle.engine import Engine, EngineSettings, Request, Seconds, Step, one_second, replay


def longest(engine: Engine, request: Request) -> int:
    """The tokens that a request may come to, as far as the engine is told (`max_tokens` of the paper)."""
    return int(min(request.prompt_tokens + request.max_tokens, engine.settings["max_model_len"]))


def select_new(engine: Engine) -> None:
    """Take requests in order until one finds no seat, no memory to reserve, or, but for the first, no budget."""
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
    """All that run go on by a token, for their memory is reserved; then come the new ones."""
    for request in engine.running:
        engine.go_on(request, 1, request.num_tokens)
    select_new(engine)


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run an engine on a virtual clock, and describe each step right after its planning."""
    return replay(schedule, settings, requests, seconds=seconds)
