"""The admission queue: requests that a policy's `hold` condition keeps at the scheduler until an instance admits them.

A request in an engine's queue cannot go to another instance that is free sooner, and may preempt others when it starts.
At the scheduler it waits for whichever instance can take it first. Requests with different targets wait in separate
lanes, so that a request that no instance admits does not delay others. Time is an argument here, and requests are
numbers that grow with their arrival.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.admission.order import FairTurns, HeadOf, WaitingRequest, are_level, by_arrival
from scheduler.candidates import Rows
from scheduler.columns import Column

RETRY_S = 0.05  # mean pause between two attempts of the first request, at first
ASK_AGAIN_S = 0.1  # until an instance that did not admit a request is asked again, if no request has finished there
BACKGROUND_ASK_AGAIN_S = 0.5  # for a request that has no deadline to miss

Order = Callable[[Sequence[int], float], Sequence[int]]  # the numbers of waiting requests, by turn, at a time


@dataclass(slots=True)
class AdmissionQueue:
    """The requests of one model that wait at one scheduler, first come, first served unless an order says otherwise.

    No request waits beyond its deadline, and when more than `max_held` requests wait, or requests with more than
    `max_tokens` tokens, one leaves without admission: the oldest of those that have no deadline to miss, else the
    oldest. A turn, one for each lane, chooses its first request; an `order` sorts all requests instead, and there are
    no lanes.
    """

    max_held: int = sys.maxsize
    order: Order | None = None
    turn: HeadOf = by_arrival
    max_tokens: float = math.inf
    num_tokens: float = 0.0
    num_best_effort: int = 0
    _numbers: list[int] = field(default_factory=list)  # by arrival
    _requests: dict[int, WaitingRequest] = field(default_factory=dict)
    _lanes: dict[int, list[int]] = field(default_factory=dict)  # by arrival
    _num_of_tenant: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._numbers)

    @property
    def numbers(self) -> list[int]:
        """The waiting requests, by arrival."""
        return self._numbers.copy()

    @property
    def next_to_leave(self) -> int:
        """The request that leaves where too many wait: the oldest without a deadline to miss, else the oldest."""
        background = [lane[0] for key, lane in self._lanes.items() if is_background(key)]
        return min(background, default=self._numbers[0])

    @property
    def is_full(self) -> bool:
        """Whether more requests or tokens wait than are allowed."""
        return len(self._numbers) > self.max_held or self.num_tokens > self.max_tokens

    def num_of_tenant(self, tenant: str) -> int:
        """Return how many requests of a tenant wait."""
        return self._num_of_tenant.get(tenant, 0)

    def head(self, now_s: float, lane: int = 0) -> int:
        """Return the request of a lane whose turn it is; -1 where the lane is empty."""
        if self.order is not None:
            return self._numbers[0] if len(self._numbers) < 2 else self.order(self._numbers, now_s)[0]
        waiting = self._lanes.get(lane, ())
        if not waiting:
            return NO_NUMBER
        if len(waiting) < 2 or self.turn is by_arrival:
            return waiting[0]
        return self.turn([self._requests[number] for number in waiting], now_s)

    def may_overtake(self, number: int, head: int) -> bool:
        """Return whether a request that is about to be late may be tried before the first one of its lane."""
        return self.order is not None or are_level(self.turn, self._requests[number], self._requests[head])

    def next_shorter(self, number: int) -> int:
        """Return the first request behind another in its lane that is shorter; -1 where there is none.

        A long request that no instance admits now does not delay a short one that an instance may admit.
        """
        request = self._requests[number]
        waiting = self._lanes[request.lane]
        if self.order is not None or self.turn is not by_arrival:
            return NO_NUMBER
        behind = waiting[bisect.bisect_right(waiting, number) :]
        return next((other for other in behind if self._requests[other].num_tokens < request.num_tokens), NO_NUMBER)

    def has_urgent(self, loosest_tpot_s: float, number: int) -> bool:
        """Return whether another request waits that has a deadline to miss and a target no stricter than this one."""
        least = lane_of(loosest_tpot_s, background=False)
        return any(key >= least and not is_background(key) and lane != [number] for key, lane in self._lanes.items())

    def has_lane(self, lane: int) -> bool:
        """Return whether any request waits before one that joins a lane."""
        return bool(self._numbers) if self.order is not None else lane in self._lanes

    def count_served(self, tenant: str, num_tokens: float) -> None:
        """Count a request that is admitted, whether it has waited or not."""
        if isinstance(self.turn, FairTurns):
            self.turn.served(tenant, num_tokens, self._num_of_tenant)

    def heads(self, now_s: float) -> list[int]:
        """Return the requests whose turn it is, one of each lane, the strictest lane first.

        Where tenants take turns, the lanes come in the order of their turns, best effort and late requests last.
        """
        if self.order is not None:
            return [self.head(now_s)]
        heads = [self.head(now_s, lane) for lane in sorted(self._lanes)]
        if isinstance(self.turn, FairTurns):
            tokens_of = self.turn.tokens_of
            heads.sort(key=lambda head: (is_background(self.lane_of(head)), tokens_of(self._requests[head].tenant)))
        return heads

    def join(self, number: int, deadline_s: float = math.inf, request: WaitingRequest | None = None) -> None:
        """Add a request that waits until its deadline at the latest."""
        request = WaitingRequest(number=number) if request is None else request
        request.leave_s = deadline_s
        bisect.insort(self._numbers, number)
        bisect.insort(self._lanes.setdefault(request.lane, []), number)
        self._requests[number] = request
        self._num_of_tenant[request.tenant] += 1
        self.num_tokens += request.num_tokens
        self.num_best_effort += request.best_effort

    def leave(self, number: int) -> None:
        """Remove a request."""
        request = self._requests.pop(number)
        del self._numbers[self._position(number)]
        lane = self._lanes[request.lane]
        del lane[bisect.bisect_left(lane, number)]
        if not lane:
            del self._lanes[request.lane]
        self._num_of_tenant[request.tenant] -= 1
        if not self._num_of_tenant[request.tenant]:
            del self._num_of_tenant[request.tenant]
        self.num_tokens = self.num_tokens - request.num_tokens if self._numbers else 0.0
        self.num_best_effort -= request.best_effort

    def change(self, deadline_s: float, request: WaitingRequest) -> None:
        """Move a request to another lane, or change what else its order knows of it."""
        self.leave(request.number)
        self.join(request.number, deadline_s, request)

    def lane_of(self, number: int) -> int:
        """Return the lane of a request."""
        return self._requests[number].lane

    def backlog(self, now_s: float, *, background: bool) -> tuple[float, float]:
        """Return the tokens that wait before a new request, and after how many seconds all of them have left.

        Requests with deadlines to miss wait behind each other only, and until they are late at most.
        """
        ahead = [self._requests[number] for key, lane in self._lanes.items() for number in lane
                 if background or not is_background(key)]  # fmt: skip
        leave_s = (min(one.leave_s, math.inf if is_background(one.lane) else one.due_s) for one in ahead)
        return sum(one.num_tokens for one in ahead), max(leave_s, default=now_s) - now_s

    def must_leave(self, number: int, now_s: float) -> bool:
        """Return whether a request leaves the queue now, also if no instance admits it."""
        return self._requests[number].leave_s <= now_s or (self.is_full and number == self.next_to_leave)

    def deadline_s(self, number: int) -> float:
        """Return when a request leaves at the latest."""
        return self._requests[number].leave_s

    def _position(self, number: int) -> int:
        return bisect.bisect_left(self._numbers, number)


# Lanes.

NO_NUMBER = -1
BACKGROUND = 1 << 20  # added to the lanes of requests that must not make others miss a deadline
LANES_PER_DOUBLING = 2  # of the target
LOOSEST = 100  # the lane of requests without a target for the time per token


def lane_of(tpot_slo_s: float, *, background: bool) -> int:
    """Return the lane of requests with about this target; those of background requests come last.

    A lower lane is stricter. Targets within a factor of about 1.4 share a lane, so that there are few lanes.
    """
    lane = LOOSEST
    if 0 < tpot_slo_s < math.inf:
        lane = min(LOOSEST - 1, max(-LOOSEST, round(LANES_PER_DOUBLING * math.log2(tpot_slo_s))))
    return lane + BACKGROUND if background else lane


def is_background(lane: int) -> bool:
    """Return whether the requests of a lane are in the background: they must not make others miss a deadline."""
    return lane >= BACKGROUND // 2


class RecentRefusals:
    """Remembers which instances did not admit a request, so that they are asked again only when something changed."""

    def __init__(self, num_instances: int, ask_again_s: float = ASK_AGAIN_S) -> None:
        """Start without a refusal."""
        self._ask_again_s = ask_again_s
        self._num_finished = np.zeros(num_instances)  # when they were asked
        self._refused_s = np.full(num_instances, -np.inf)

    def worth_asking(self, num_finished: Column, now_s: float, rows: Rows | None = None) -> npt.NDArray[np.bool_]:
        """Return which instances admitted the last request, finished one since, or refused long enough ago."""
        chosen = slice(None) if rows is None else rows
        finished = num_finished > self._num_finished[chosen]
        return finished | (now_s - self._refused_s[chosen] >= self._ask_again_s)

    def note(self, refused: npt.NDArray[np.bool_], num_finished: Column, now_s: float, rows: Rows | None) -> None:
        """Record which instances refused, and how many requests had finished there."""
        chosen = slice(None) if rows is None else rows
        self._num_finished[chosen] = num_finished
        self._refused_s[chosen] = np.where(refused, now_s, -np.inf)


def retry_pause_s(waited_s: float, random: float) -> float:
    """Return the pause before the next attempt, by how long the first request has waited and a number from 0 to 1.

    Schedulers do not know of each other's requests. With equal pauses one of them would always be the first to see a
    free instance; and the longer its first request has waited, the sooner it tries again, down to a quarter.
    """
    return RETRY_S * (0.5 + random) / min(1.0 + waited_s, 4.0)
