"""Orders in which requests of an admission queue get their turn."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from predictor.suggestions import require_choice

AGEING_S = 10.0  # of waiting that counts as much as one step of priority
MAX_TENANTS = 10_000  # whose tokens are remembered


@dataclass(slots=True, kw_only=True)
class WaitingRequest:
    """What an order needs to know of a waiting request; its number grows with its arrival."""

    number: int
    lane: int = 0
    leave_s: float = math.inf  # when it leaves at the latest
    joined_s: float = 0.0
    due_s: float = math.inf  # of its first token
    priority: int = 0  # lower goes first
    tenant: str = ""
    num_tokens: float = 0.0  # of its prompt and its predicted response
    best_effort: bool = False


HeadOf = Callable[[Sequence[WaitingRequest], float], int]  # the number of the first of some waiting requests, at a time


def by_arrival(waiting: Sequence[WaitingRequest], _now_s: float) -> int:
    """First come, first served."""
    return waiting[0].number


def by_deadline(waiting: Sequence[WaitingRequest], _now_s: float) -> int:
    """The first token that is due first; requests without deadlines by arrival, after all others."""
    return min(waiting, key=lambda one: (one.due_s, one.number)).number


def by_length(waiting: Sequence[WaitingRequest], _now_s: float) -> int:
    """The fewest tokens of prompt and predicted response; equal ones by arrival."""
    return min(waiting, key=lambda one: (one.num_tokens, one.number)).number


def by_priority(waiting: Sequence[WaitingRequest], now_s: float) -> int:
    """The lowest priority number; each ten seconds of waiting count as one."""
    return min(waiting, key=lambda one: (one.priority - (now_s - one.joined_s) / AGEING_S, one.number)).number


class FairTurns:
    """Tenants take turns by tokens over their weights: the next request is one of the tenant that got the fewest.

    A new or returning tenant starts level with the one that got the fewest: it collects no turns without requests.
    """

    def __init__(self, weights: Mapping[str, float] = MappingProxyType({})) -> None:
        """Start without any tenant; one without a weight has 1, and one of weight 2 gets twice as many tokens."""
        self._weights = weights
        self._served: dict[str, float] = {}
        self._level = 0.0  # the fewest tokens that a waiting tenant had got when one was served last

    def __call__(self, waiting: Sequence[WaitingRequest], _now_s: float) -> int:
        """Return the number of the first request of the tenant whose turn it is."""
        return min(waiting, key=lambda one: (self.tokens_of(one.tenant), one.number)).number

    def served(self, tenant: str, num_tokens: float, waiting_tenants: Iterable[str] = ()) -> None:
        """Count the tokens of a request that was admitted, while requests of some tenants waited."""
        before = self.tokens_of(tenant)
        self._level = max(self._level, min(map(self.tokens_of, waiting_tenants), default=before))
        if len(self._served) >= MAX_TENANTS and tenant not in self._served:
            self._forget()
        self._served[tenant] = before + num_tokens / self._weights.get(tenant, 1.0)

    def _forget(self) -> None:
        """Forget tenants that are level with new ones, and of the others the half that is least ahead."""
        ahead = [(tokens, name) for name, tokens in self._served.items() if tokens > self._level]
        self._served = {name: tokens for tokens, name in heapq.nlargest(MAX_TENANTS // 2, ahead)}

    def tokens_of(self, tenant: str) -> float:
        """Return the tokens that a tenant got, over its weight."""
        return max(self._level, self._served.get(tenant, 0.0))


def are_level(turn: HeadOf, one: WaitingRequest, head: WaitingRequest) -> bool:
    """Return whether a request is behind the first one only by time, not by priority or by its tenant's turn."""
    if isinstance(turn, FairTurns):
        return one.tenant == head.tenant
    return turn is not by_priority or one.priority <= head.priority


ARRIVAL_TURN, DEADLINE_TURN, SHORTEST_TURN = "arrival", "deadline", "shortest"
PRIORITY_TURN, FAIR_TURN = "priority", "fair"
TURNS: dict[str, Callable[[Mapping[str, float]], HeadOf]] = {  # made with the weights of tenants
    ARRIVAL_TURN: lambda _: by_arrival,
    DEADLINE_TURN: lambda _: by_deadline,
    SHORTEST_TURN: lambda _: by_length,
    PRIORITY_TURN: lambda _: by_priority,
    FAIR_TURN: FairTurns,
}


def turn_named(name: str, weights: Mapping[str, float] = MappingProxyType({})) -> HeadOf:
    """Return an order by name, without any memory of requests."""
    require_choice("admission_turn", name, TURNS)
    return TURNS[name](weights)


# Orders over the whole queue, for simulations.


def late_last(waiting: Sequence[int], due_s: Callable[[int], float], now_s: float) -> list[int]:
    """Order by arrival; requests that are late already come last, as they would make all others late too."""
    return sorted(waiting, key=lambda number: (due_s(number) < now_s, number))


def fewest_late(
    waiting: Sequence[int], due_s: Callable[[int], float], takes_s: Callable[[int], float], now_s: float
) -> list[int]:
    """Order so that as few requests as possible are late, though these may be very late (Moore and Hodgson 1968).

    In order of arrival, whenever a request would be late, the one that takes longest among it and those before it goes
    to the end. `takes_s` is how long the whole cluster would be busy with a request.
    """
    in_time: list[int] = []
    longest: list[tuple[float, int]] = []  # a heap
    last: set[int] = set()
    busy_until_s = now_s
    for number in sorted(waiting):
        if due_s(number) < now_s:
            last.add(number)
            continue
        in_time.append(number)
        duration_s = takes_s(number)
        busy_until_s += duration_s
        heapq.heappush(longest, (-duration_s, number))
        if busy_until_s > due_s(number):
            minus_s, deferred = heapq.heappop(longest)
            busy_until_s += minus_s
            last.add(deferred)
    return [number for number in in_time if number not in last] + sorted(last)
