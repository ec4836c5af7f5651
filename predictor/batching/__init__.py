"""Local schedulers: the rules by which engines fill their steps, one per file, in one table."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba.extending import is_jitted

from predictor.batching import vllm_v1
from predictor.compiled import inner_kernel
from predictor.config import EngineConfig
from predictor.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Batcher:
    """A local scheduler: `schedule` fills one step, and returns whether the next one would be the same.

    Where it is a kernel it runs within the compiled loop; written in Python only it works all the same, slower.
    """

    schedule: Callable[[State], bool]
    null_blocks: int = 0  # KV blocks that the engine keeps for itself
    check: Callable[[EngineConfig], None] | None = None  # refuses what the engine would refuse at start


BATCHERS = {
    "vllm_v1": Batcher(schedule=vllm_v1.schedule, null_blocks=1, check=vllm_v1.check),
}


def batcher_named(name: str) -> Batcher:
    """Look a local scheduler up; an unknown name is refused with the nearest known one."""
    if name in BATCHERS:
        return BATCHERS[name]
    near = difflib.get_close_matches(name, BATCHERS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"batcher: {name!r} is none of {', '.join(BATCHERS)}{hint}")


def number_of(name: str) -> int:
    """Give the number by which the compiled loop knows a local scheduler."""
    return list(BATCHERS).index(name)


def is_compiled(batcher: Batcher) -> bool:
    """Tell whether a local scheduler can run within the compiled loop."""
    return bool(is_jitted(batcher.schedule))


def _choice(rules: list[tuple[int, Any]]) -> Any:
    """Build the kernel that calls the rule whose number the engine carries."""
    (number, schedule), *others = rules

    @inner_kernel
    def last(state: State) -> bool:
        return schedule(state)

    if not others:
        return last
    otherwise = _choice(others)

    @inner_kernel
    def choose(state: State) -> bool:
        if state.engine[0].batcher == number:
            return schedule(state)
        return otherwise(state)

    return choose


fill = _choice([(number_of(name), batcher.schedule) for name, batcher in BATCHERS.items()])
