"""Static batches, as in FasterTransformer: a batch is formed when the previous one has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.oracle.engine import Engine, EngineSettings, Seconds, Step, one_second, replay
from tests.oracle.orca import select_new


def schedule(engine: Engine) -> None:
    """Continue the current batch, or form one."""
    if not engine.running:
        select_new(engine)
        return
    for request in engine.running:
        engine.go_on(request, 1, request.num_tokens)


def replay_steps(
    settings: EngineSettings, requests: Iterable[Mapping[str, Any]], seconds: Seconds = one_second
) -> Iterator[Step]:
    """Run an engine on a virtual clock, and yield each step right after its planning."""
    return replay(schedule, settings, requests, seconds=seconds)
