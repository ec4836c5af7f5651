"""What was heard of a pool's requests lately: forecasts, outcomes, arrivals, who is where."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from scheduler.provisioning.cold_starts import ColdStarts
from scheduler.provisioning.limits import Aims, ScalingLimits
from scheduler.provisioning.load import Load, load_of
from scheduler.provisioning.pool_state import LATELY_S, PoolState
from scheduler.provisioning.trend import Trend, trend_of

BIN_S = 5.0
NUM_BINS = 48  # that a trend is read from
KEPT = 4096  # placements
LONGEST_S = 600.0  # beyond what was foreseen, after which a request is thought to have ended unheard
FEWEST = 8  # placements in a bin whose pace is believed
FEW = 256
USUALLY_LATE, UNSEEN = 1.15, 30.0  # as long as nothing ended; how many ends weigh as much
SETTLED = 1.5  # of the longest answers' time: full for so long, an instance has long and short ones as they usually are
FEWEST_BINS = 3  # before which a rate is too rough to act on


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A request that went to an instance, and what was foreseen."""

    request_id: str
    instance_id: str
    prompt_tokens: int
    output_tokens: int
    e2e_s: float
    next_best_e2e_s: float = math.nan  # elsewhere; NaN where nobody looked


@dataclass(slots=True)
class Bin:
    """A short span of time."""

    start_s: float
    num: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    company: float = 0.0  # summed over its placements
    ends: int = 0
    took_s: float = 0.0  # summed over those that ended well
    foreseen_s: float = 0.0  # for the same
    ready_s: float = 0.0  # of instances, in sum
    full_ends: int = 0  # on instances that had been full for a while
    full_s: float = 0.0


class Observed:
    """Follows one pool's requests; time is what its caller says it is, and never runs backwards."""

    def __init__(self, aims: Aims, limits: ScalingLimits) -> None:
        """Know nothing yet."""
        self.cold_starts = ColdStarts(aims.cold_start_s)
        self._aims, self._calm_s = aims, limits.calm_s
        self._bins: deque[Bin] = deque(maxlen=NUM_BINS + 1)
        self._lately: deque[tuple[float, Placed]] = deque(maxlen=KEPT)
        self._worst: deque[tuple[float, float]] = deque()  # falling: the highest of either kind, while calm counts
        self._there: dict[str, tuple[str, float, float]] = {}  # by request: where, when it should end, after how long
        self._since_change = [0.0, 0.0]
        self._on: Counter[str] = Counter()  # requests on each instance
        self._summed_s = -math.inf  # up to when the next two are
        self._trend, self._load = Trend(), Load()
        self._full_since: dict[str, float] = {}
        self._full, self._settled_s = math.inf, math.inf  # requests at a time; how long it takes then to be settled
        self._looked_s = math.nan
        self._num_ready: int | None = None
        self._came_up_s = -math.inf

    def placed(self, now_s: float, one: Placed) -> None:
        """Take note of a placement."""
        if not (math.isfinite(one.e2e_s) and one.e2e_s >= 0):
            return
        now = self._bin(now_s)
        now.num += 1
        now.tokens += max(1, one.output_tokens)
        now.seconds += one.e2e_s
        now.company += self._on[one.instance_id]
        self._lately.append((now_s, one))
        self._leave(one.request_id)
        self._there[one.request_id] = (one.instance_id, now_s + one.e2e_s, one.e2e_s)
        self._on[one.instance_id] += 1
        self._since_change[0] = max(self._since_change[0], one.e2e_s)
        self._note_worst(now_s, one.e2e_s)

    def ended(self, now_s: float, request_id: str, e2e_s: float | None) -> None:
        """Take note of an end; without a time, of one that nobody waited for."""
        if (where := self._there.get(request_id)) is not None:
            now = self._bin(now_s)
            now.ends += 1
            now.full_ends += self._has_settled(where[0], now_s)
            if e2e_s is not None and math.isfinite(e2e_s):
                now.took_s += e2e_s
                now.foreseen_s += where[2]
        self._leave(request_id)
        if e2e_s is not None and math.isfinite(e2e_s):
            self._since_change[1] = max(self._since_change[1], e2e_s)
            self._note_worst(now_s, e2e_s)

    def changed(self) -> None:
        """Forget how bad it was before the number of instances changed."""
        self._since_change = [0.0, 0.0]

    def heard_of(self, request_id: str) -> bool:
        """Tell whether a request is thought to be on an instance."""
        return request_id in self._there

    def num_on(self, instance_id: str) -> int:
        """Count the requests on an instance."""
        return self._on[instance_id]

    def losses(self, now_s: float, instance_ids: Sequence[str]) -> Mapping[str, tuple[float, float]]:
        """Tell how much later each instance's latest requests would have ended without it, and what is left there.

        Where nobody looked elsewhere the first is unknown, and taken for nothing.
        """
        missed = dict.fromkeys(instance_ids, 0.0)
        left = dict.fromkeys(instance_ids, 0.0)
        for _, one in takewhile(lambda at: at[0] > now_s - self._calm_s, reversed(self._lately)):
            if one.instance_id in missed and math.isfinite(one.next_best_e2e_s):
                missed[one.instance_id] += max(0.0, one.next_best_e2e_s - one.e2e_s)
        for where, due_s, _ in self._there.values():
            if where in left:
                left[where] += max(0.0, due_s - now_s)
        return {name: (missed[name], left[name]) for name in instance_ids}

    def situation(
        self,
        now_s: float,
        *,
        num_ready: int,
        num_starting: int,
        ready_in_s: tuple[float, ...] = (),
        unix_s: float = 0.0,
    ) -> PoolState:
        """Sum up."""
        self._note_full(now_s, num_ready)
        self._forget(now_s)
        self._sum_up()
        lately = [one.e2e_s for at_s, one in takewhile(lambda at: at[0] > now_s - LATELY_S, reversed(self._lately))]
        return PoolState(
            now_s=now_s,
            unix_s=unix_s,
            num_ready=num_ready,
            num_starting=num_starting,
            worst_forecast_s=self._since_change[0],
            worst_outcome_s=self._since_change[1],
            worst_lately_s=self._worst[0][1] if self._worst else 0.0,
            forecast_p_s=float(np.quantile(lately, self._aims.quantile)) if lately else 0.0,
            cold_start_s=self.cold_starts.expected_s,
            in_flight=len(self._there),
            ends=sum(one.ends for one in self._bins),
            ready_s=sum(one.ready_s for one in self._bins),
            full_ends=sum(one.full_ends for one in self._bins),
            full_s=sum(one.full_s for one in self._bins),
            same_for_s=now_s - self._came_up_s,
            ready_in_s=ready_in_s,
            trend=self._trend,
            load=self._load,
        )

    # Within.

    def _note_full(self, now_s: float, num_ready: int) -> None:
        """Follow how many there are, and which of them have as many requests as they serve at a time, or more."""
        passed_s = 0.0 if math.isnan(self._looked_s) else min(BIN_S, now_s - self._looked_s)
        self._looked_s = now_s
        if self._num_ready is not None and num_ready > self._num_ready:
            self._came_up_s = now_s
        self._num_ready = num_ready
        now = self._bin(now_s)
        now.ready_s += passed_s * num_ready
        now.full_s += passed_s * sum(self._has_settled(name, now_s) for name in self._full_since)
        self._full_since = {
            name: self._full_since.get(name, now_s) for name, num in self._on.items() if num >= self._full
        }

    def _late(self) -> float:
        """Tell how much longer requests take than was foreseen: forecasts know nothing of those who come later."""
        foreseen_s, took_s = (sum(getattr(one, name) for one in self._bins) for name in ("foreseen_s", "took_s"))
        doubt_s = UNSEEN * foreseen_s / max(1, sum(one.ends for one in self._bins))
        return (took_s + doubt_s * USUALLY_LATE) / (foreseen_s + doubt_s) if foreseen_s > 0 else USUALLY_LATE

    def _has_settled(self, instance_id: str, now_s: float) -> bool:
        return now_s - self._full_since.get(instance_id, math.inf) >= self._settled_s

    def _bin(self, now_s: float) -> Bin:
        start_s = now_s // BIN_S * BIN_S
        if not self._bins:
            self._bins.append(Bin(start_s))
        if start_s - self._bins[-1].start_s > NUM_BINS * BIN_S:  # nothing was heard for longer than is remembered
            self._bins.clear()
            self._bins.append(Bin(start_s - NUM_BINS * BIN_S))
        while self._bins[-1].start_s < start_s:
            self._bins.append(Bin(self._bins[-1].start_s + BIN_S))
        return self._bins[-1]

    def _leave(self, request_id: str) -> None:
        where = self._there.pop(request_id, None)
        if where is not None:
            self._on[where[0]] -= 1
            if not self._on[where[0]]:
                del self._on[where[0]]

    def _note_worst(self, now_s: float, e2e_s: float) -> None:
        while self._worst and self._worst[-1][1] <= e2e_s:
            self._worst.pop()
        self._worst.append((now_s, e2e_s))

    def _forget(self, now_s: float) -> None:
        while self._worst and self._worst[0][0] <= now_s - self._calm_s:
            self._worst.popleft()
        lost = [name for name, (_, due_s, _) in self._there.items() if due_s < now_s - LONGEST_S]
        for name in lost:
            self._leave(name)

    def _sum_up(self) -> None:
        """Read trend and load anew when another span of time is over; in the beginning whenever asked."""
        if self._bins[-1].start_s == self._summed_s and len(self._lately) > FEW:
            return
        self._summed_s = self._bins[-1].start_s
        over = [float(one.num) for one in self._bins][:-1]
        self._trend = trend_of(np.array(over), BIN_S) if len(over) >= FEWEST_BINS else Trend()
        spans = [(one.company / one.num, one.seconds / one.tokens) for one in self._bins if one.num >= FEWEST]
        prompts = np.array([float(one.prompt_tokens) for _, one in self._lately])
        outputs = np.array([float(one.output_tokens) for _, one in self._lately])
        self._load = load_of(prompts, outputs, self._aims.quantile, spans, self._aims.room).slowed(self._late())
        load = self._load
        self._full = load.company(self._aims.room, threshold_s=self._aims.threshold_s, share=1.0)
        if math.isfinite(self._full):
            self._settled_s = SETTLED * load.tail_tokens * (load.pace_s + load.drag_s * self._full)
