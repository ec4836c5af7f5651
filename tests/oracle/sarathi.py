"""Sarathi-Serve's Algorithm 3 (OSDI 24), stall-free batching, with the memory rules of its vLLM version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.oracle.engine import Engine, EngineSettings, Seconds, Step, decode_all, one_second, replay


def schedule(engine: Engine) -> None:
    """Every decode (lines 6-8), then the started prompts (9-12), then new ones (13-21), within the budget."""
    decode_all(engine, spare_blocks=1)
    for request in engine.running:
        chunk = min(request.num_tokens - request.computed, engine.budget)
        if request.id not in engine.scheduled and chunk > 0:
            engine.go_on(request, chunk, request.num_tokens)
    while engine.waiting and engine.has_seat and engine.budget > 0:
        request = engine.waiting[0]
        if engine.blocks_for(request.num_tokens) > engine.free_blocks - engine.watermark_blocks:
            return
        engine.admit(request, min(request.num_tokens, engine.budget), request.num_tokens)


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run an engine on a virtual clock, and yield each step right after its planning."""
    return replay(schedule, settings, requests, seconds=seconds)
