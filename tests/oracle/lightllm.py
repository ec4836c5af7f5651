"""LightLLM with its past-future scheduler: whole prompts are admitted while the future memory peak fits.

The router decodes ten times between two checks of the queue, with or without an admission
(`RouterManager._step`, `has_wait_tokens` and `max_wait_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.oracle.engine import Engine, EngineSettings, Request, Seconds, Step, decode_all, one_second, replay

DECODES_BETWEEN_LOOKS = 10


class Router:
    """The local scheduler, which counts the decodes since its last check of the queue."""

    def __init__(self) -> None:
        self.num_decodes = 0

    def schedule(self, engine: Engine) -> None:
        """Check the queue when idle or when it is due; decode without an admission."""
        if not engine.running:
            self.num_decodes = 0
            admit(engine)
            return
        if self.num_decodes == DECODES_BETWEEN_LOOKS:
            self.num_decodes = 0
            if admit(engine):
                return
        decode_all(engine)
        self.num_decodes += 1


def admit(engine: Engine) -> bool:
    """Prefill from the head of the queue while seats, tokens and the future peak allow; return whether any was admitted."""
    while engine.waiting and engine.has_seat:
        request = engine.waiting[0]
        if request.num_tokens > engine.budget and engine.scheduled:
            break
        if peak_blocks(engine, [*engine.running, request]) > engine.settings["num_gpu_blocks"]:
            break
        engine.admit(request, request.num_tokens, request.num_tokens)
    return bool(engine.scheduled)


def peak_blocks(engine: Engine, together: list[Request]) -> int:
    """Return the largest number of blocks held: just before each request ends, by all that are left then."""
    left = {request.id: engine.final_tokens(request) - request.num_output for request in together}
    return max(
        sum(engine.blocks_for(other.num_tokens + ahead) for other in together if left[other.id] >= ahead)
        for ahead in left.values()
    )


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run an engine on a virtual clock, and yield each step right after its planning."""
    return replay(Router().schedule, settings, requests, seconds=seconds)
