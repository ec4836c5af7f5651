"""What the parts of vLLM's scheduler are called, where versions differ; all other names are the same since 0.28."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from typing import Any

Queues = tuple[
    list[Any], list[Any]
]  # waiting requests in the order in which vLLM tries them, and those that hold blocks


@dataclass(frozen=True, slots=True)
class SchedulerNames:
    """The names in one version."""

    seats: str  # the maximum number of running requests
    queues: Callable[[Any], Queues]


def _skipped_and_waiting(scheduler: Any) -> Queues:
    """Return the queues of 0.28 to 0.30: skipped requests come first, or are merged with the others by priority."""
    skipped = list(scheduler.skipped_waiting)
    by_priority = str(scheduler.scheduler_config.policy) == "priority"
    waiting = list(merge(skipped, scheduler.waiting)) if by_priority else list(chain(skipped, scheduler.waiting))
    return waiting, [one for one in skipped if one.num_computed_tokens or one.status.name == "WAITING_FOR_REMOTE_KVS"]


def _holding_and_waiting(scheduler: Any) -> Queues:
    """Return the queues of 0.31 and later: requests that hold blocks come first; a heap iterates in its order."""
    holding = list(scheduler.kv_holding_waiting)
    return [*holding, *scheduler.waiting], holding


NAMES = {
    (0, 28): SchedulerNames("max_num_running_reqs", _skipped_and_waiting),
    (0, 31): SchedulerNames("max_num_active_reqs", _holding_and_waiting),
}


def names_for(release: tuple[int, int]) -> SchedulerNames:
    """Return the names in a release of the table of rules."""
    return NAMES[max(since for since in NAMES if since <= release)]
