"""The conditions of a simulated run: delays, stale indicators, noise, outages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from predictor.config import require_count
from predictor.lengths import RESIDUALS
from scheduler.admission.order import DEADLINE_TURN, FAIR_TURN, PRIORITY_TURN, SHORTEST_TURN

ENGINE_CACHE, SENT_INDEX = "engine", "sent"
FIRST_COME, LATE_LAST, FEWEST_LATE = "first_come", "late_last", "fewest_late"
MIN_HOP_S = 1e-6  # coupled engines advance by at most this time together
WHOLE_QUEUE_TURNS = (LATE_LAST, FEWEST_LATE)  # which sort the whole queue, without lanes
TURNS = (FIRST_COME, *WHOLE_QUEUE_TURNS, DEADLINE_TURN, SHORTEST_TURN, PRIORITY_TURN, FAIR_TURN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """An instance is down from `from_s` until `until_s`, and loses its state.

    An outage from time 0 on stands for an instance that is provisioned later: it is ready at `until_s`.
    """

    instance: int
    from_s: float
    until_s: float = math.inf

    def __post_init__(self) -> None:
        """Reject an empty or negative span of time."""
        require_count("outage.instance", self.instance, at_least=0)
        if not 0 <= self.from_s < self.until_s:
            raise ValueError(f"outage.until_s: must be after from_s {self.from_s}, not {self.until_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What decisions cost, and what schedulers know when they decide.

    A decision takes `decision_s` until the request is reserved at an instance, which receives it `network_s` later.
    Instances report indicators every `indicator_period_s`, and schedulers receive them `indicator_delay_s` later; if
    both are 0, indicators are always current. Forecasts are made at every decision. Without `reservations`, indicators
    and forecasts leave out requests that are on their way. `prefix_view` is where prefix hits are looked up: in the
    engines' caches, or in an index of what was sent. If the policy holds requests, `turn` is the order in which they
    are retried; those that were held for `late_s` are late; `best_effort_share` is that of `DecisionRules`. `hop_s`
    passes between the end of a prefill leg and the arrival of its decode leg.
    """

    num_schedulers: int = 1
    decision_s: float = 0.0
    network_s: float = 0.0
    indicator_period_s: float = 0.0
    indicator_delay_s: float = 0.0
    reservations: bool = True
    step_noise: float = 0.0  # standard deviation of the logarithm of each step's time
    residual: str = "conditional_median"
    order_s_per_token: float = 0.0
    late_s: float = math.inf
    turn: str = FIRST_COME
    max_held: int = 0  # requests in an admission queue; 0: any number
    max_held_of_tenant: int = 0  # of these, of one tenant
    max_held_best_effort: int = 0  # of these, best effort
    best_effort_share: float = 0.05
    deadline_margin_s: float = 0.0  # by which a request has to be early by its forecast to be admitted
    prefix_view: str = ENGINE_CACHE
    hop_s: float = 0.003
    sample_s: float = 1.0  # interval of the cluster samples; 0 for none
    outages: tuple[Outage, ...] = ()

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        require_count("num_schedulers", self.num_schedulers)
        for name in (
            "decision_s", "network_s", "indicator_period_s", "indicator_delay_s", "step_noise", "sample_s",
            "order_s_per_token", "deadline_margin_s",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}: must be a number from 0 on, not {value!r}")
        if self.residual not in RESIDUALS:
            raise ValueError(f"residual: {self.residual!r} is none of {', '.join(RESIDUALS)}")
        if not self.late_s > 0:
            raise ValueError(f"late_s: must be a number above 0, not {self.late_s!r}")
        if self.turn not in TURNS:
            raise ValueError(f"turn: {self.turn!r} is none of {', '.join(TURNS)}")
        for name in ("max_held", "max_held_of_tenant", "max_held_best_effort"):
            require_count(name, getattr(self, name), at_least=0)
        if not 0 <= self.best_effort_share <= 1:
            raise ValueError(f"best_effort_share: must be a share from 0 to 1, not {self.best_effort_share!r}")
        if not MIN_HOP_S <= self.hop_s < math.inf:
            raise ValueError(f"hop_s: must be a time from {MIN_HOP_S:g} on, not {self.hop_s!r}")
        if self.prefix_view not in (ENGINE_CACHE, SENT_INDEX):
            raise ValueError(f"prefix_view: {self.prefix_view!r} is neither {ENGINE_CACHE} nor {SENT_INDEX}")

    @property
    def has_fresh_indicators(self) -> bool:
        """Whether indicators are always current."""
        return self.indicator_period_s == 0 and self.indicator_delay_s == 0


CONDITION_NAMES = tuple(spec.name for spec in fields(Conditions))


def require_outages(outages: Sequence[Outage], num_instances: int) -> None:
    """Reject outages of unknown instances, and outages of one instance that overlap."""
    for outage in outages:
        if outage.instance >= num_instances:
            raise ValueError(f"outage.instance: {outage.instance} is none of {num_instances}")
    by_instance = sorted(outages, key=lambda outage: (outage.instance, outage.from_s))
    for one, other in pairwise(by_instance):
        if one.instance == other.instance and other.from_s < one.until_s:
            raise ValueError(f"outage.from_s: instance {one.instance} is already down at {other.from_s:g} s")
