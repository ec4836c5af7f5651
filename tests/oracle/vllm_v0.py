"""vLLM 0.7.2's scheduler for one sequence per request and preemption by recompute, written from its rules.

Each function below is named after the method of `vllm/core/scheduler.py` whose rules it follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.oracle.engine import Engine, EngineSettings, Request, Seconds, Step, one_second, replay


def schedule(engine: Engine) -> None:
    """Follow the mode that the engine was started in."""
    if engine.settings["enable_chunked_prefill"]:
        schedule_chunked_prefill(engine)
    else:
        schedule_default(engine)


def schedule_default(engine: Engine) -> None:
    """Prefills alone; without any, decodes, after the preemptions of the priority policy."""
    schedule_prefills(engine, list(engine.waiting))
    if engine.scheduled:
        return
    if engine.settings["scheduling_policy"] == "priority":
        schedule_priority_preemption(engine)
    schedule_running(engine)


def schedule_chunked_prefill(engine: Engine) -> None:
    """Running requests go first; a request that this step preempts is admitted in a later one at the earliest.

    The policy has no effect: the queue is first come, first served in this mode.
    """
    waiting = list(engine.waiting)
    schedule_running(engine)
    schedule_prefills(engine, waiting)


def schedule_prefills(engine: Engine, waiting: list[Request]) -> None:
    """Admit in order; blocks for the whole prompt must be free above the watermark, and are taken at once."""
    for request in waiting:
        num_tokens = request.num_tokens
        if engine.settings["enable_chunked_prefill"]:
            num_tokens = min(num_tokens, engine.budget)
        if engine.blocks_for(request.num_tokens) > engine.free_blocks - engine.watermark_blocks:
            return
        if num_tokens == 0 or num_tokens > engine.budget or not engine.has_seat:
            return
        engine.admit(request, num_tokens, request.num_tokens)


def schedule_running(engine: Engine) -> None:
    """Continue all requests in order; where blocks are short, the last one that is not scheduled yet is preempted."""
    for request in list(engine.running):
        if request not in engine.running:
            continue
        while engine.free_blocks < touched_blocks(engine, request):
            victim = engine.running[-1]
            engine.preempt(victim)
            if victim is request:
                return
        num_tokens = min(request.num_tokens - request.computed, engine.budget)
        assert num_tokens > 0, "the budget covers a token for each seat"
        engine.go_on(request, num_tokens, request.num_tokens)


def touched_blocks(engine: Engine, request: Request) -> int:
    """Return the blocks that must be free to continue (`BlockTable.get_num_blocks_touched_by_append_slots`).

    That is one for a decode, even where its block is not full, and one for a started prompt, although it has all its
    blocks, unless it fills the last one.
    """
    if request.is_decoding:
        return 1
    return 0 if request.num_tokens % engine.settings["block_size"] == 0 else 1


def rank(request: Request) -> tuple[int, float]:
    """By priority, then arrival; lower goes first."""
    return (request.priority, request.arrival_s)


def schedule_priority_preemption(engine: Engine) -> None:
    """Preempt requests that rank below the head of the queue until it fits; only here both queues are sorted."""
    engine.running.sort(key=rank)
    if engine.waiting:
        head = engine.waiting[0]
        while engine.running and rank(engine.running[-1]) > rank(head) and not could_enter(engine, head):
            engine.preempt(engine.running[-1])
    engine.waiting.sort(key=rank)


def could_enter(engine: Engine, request: Request) -> bool:
    """Whether there is a seat for a request, and blocks."""
    return engine.has_seat and engine.blocks_for(request.num_tokens) <= engine.free_blocks - engine.watermark_blocks


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run an engine on a virtual clock, and yield each step right after its planning."""
    return replay(schedule, settings, requests, seconds=seconds, sorts_arrivals=False)
