"""How right `Retry-After` is: the time that a shed request received, beside that after which it would be admitted.

A scheduler knows the waiting requests and the engines, and not the requests that will come. So a time is right if the
same request, sent again after that time, is admitted at once, and sent earlier is not, provided that no other request
has come after it was shed. To find that moment, the run is repeated with the requests that had arrived by then and with
one copy of the shed request, sent earlier or later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scheduler.admission.lateness import MIN_RETRY_AFTER_S
from simulator.assembly import simulate
from simulator.conditions import Conditions
from simulator.fleet import InstanceSpec
from simulator.result import SHED, STATUSES, RunResult
from simulator.workload import Workload, without_prefixes

RESOLUTION_S = 0.01
LONGEST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryTime:
    """The `Retry-After` of one shed request, and the time after which it would have been admitted at once."""

    number: int
    stated_s: float
    actual_s: float  # infinite: never, as far as was tried

    @property
    def error(self) -> float:
        """The difference as a share of the actual time, which counts as at least the shortest `Retry-After`."""
        if math.isinf(self.actual_s):
            return 1.0
        return abs(self.stated_s - self.actual_s) / max(self.actual_s, MIN_RETRY_AFTER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """The arguments of a run beside its workload, with which it is repeated."""

    specs: Sequence[InstanceSpec]
    policy: str | Mapping[str, Any]
    conditions: Conditions
    seed: int = 0

    def admits_at_once(self, work: Workload) -> bool:
        """Return whether the last request is placed when it arrives."""
        last = simulate(self.specs, work, self.policy, self.conditions, seed=self.seed).decisions[len(work) - 1]
        return bool(last.status != STATUSES.index(SHED) and last.decided_s == work.arrival_s[-1])


def retry_times(result: RunResult, again: Rerun, numbers: Sequence[int]) -> Iterator[RetryTime]:
    """Find for some shed requests of a run when they would have been admitted."""
    for number in numbers:
        row = result.decisions[number]
        if row.status != STATUSES.index(SHED):
            raise ValueError(f"numbers: request {number} was not shed")
        shed_s, stated_s = float(row.decided_s), float(row.retry_after_s)

        def is_admitted(after_s: float, number: int = number, shed_s: float = shed_s) -> bool:
            return again.admits_at_once(with_copy(result.work, number, shed_s, shed_s + after_s))

        yield RetryTime(number=number, stated_s=stated_s, actual_s=_earliest(is_admitted, stated_s))


def with_copy(work: Workload, number: int, until_s: float, sent_s: float) -> Workload:
    """Return the requests that arrive until a time, and then a copy of one of them."""
    if sent_s < until_s:
        raise ValueError(f"sent_s: must be at least {until_s}, not {sent_s}")
    rows = np.append(np.flatnonzero(work.arrival_s <= until_s), number)
    return replace(
        work,
        lengths=without_prefixes(work.lengths, rows),
        arrival_s=np.append(work.arrival_s[rows[:-1]], sent_s),
        tag_median=work.tag_median[rows],
        tag_spread=work.tag_spread[rows],
        service=None if work.service is None else work.service.chosen(rows),
    )


def _earliest(is_admitted: Callable[[float], bool], guess_s: float) -> float:
    """Return the earliest time from which on a request is admitted, to the resolution."""
    low_s, high_s = 0.0, max(guess_s, RESOLUTION_S)
    if is_admitted(low_s):
        return low_s
    while not is_admitted(high_s):
        low_s, high_s = high_s, 2 * high_s
        if high_s > LONGEST_S:
            return math.inf
    while high_s - low_s > max(RESOLUTION_S, 0.02 * high_s):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if is_admitted(middle_s) else (middle_s, high_s)
    return (low_s + high_s) / 2
