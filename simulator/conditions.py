"""The conditions of a simulated run: delays, stale indicators, noise, outages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from predictor.config import require_count
from predictor.lengths import RESIDUALS
from predictor.suggestions import require_choice
from scheduler.admission.order import ARRIVAL_TURN
from scheduler.admission.order import TURNS as LIVE_TURNS
from simulator.field_checks import require_flag, require_number, require_share, require_string

ENGINE_CACHE, SENT_INDEX = "engine", "sent"
LATE_LAST, FEWEST_LATE = "late_last", "fewest_late"
MIN_HOP_S = 1e-6  # coupled engines advance by at most this time together
WHOLE_QUEUE_TURNS = (LATE_LAST, FEWEST_LATE)  # which sort the whole queue, without lanes
TURNS = (*LIVE_TURNS, *WHOLE_QUEUE_TURNS)
HELD_LIMITS = ("max_held", "max_held_tokens", "max_held_of_tenant", "max_held_best_effort", "max_held_real_time")
OLD_NAMES = {"turn": "admission_turn"}  # which older scenario files have
OLD_TURNS = {"first_come": ARRIVAL_TURN}


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
        require_number("outage.from_s", self.from_s)
        require_number("outage.until_s", self.until_s, infinite=True)
        if not 0 <= self.from_s < self.until_s:
            raise ValueError(f"outage.until_s: must be after from_s {self.from_s}, not {self.until_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What decisions cost, and what schedulers know when they decide.

    A decision takes `decision_s` until the request is reserved at an instance, which receives it `network_s` later.
    Instances report indicators every `indicator_period_s`, and schedulers receive them `indicator_delay_s` later; if
    both are 0, indicators are always current. Forecasts are made at every decision. Without `reservations`, indicators
    and forecasts leave out requests that are on their way. `prefix_view` is where prefix hits are looked up: in the
    engines' caches, or in an index of what was sent. `hop_s` passes between the end of a prefill leg and the arrival of
    its decode leg.

    The settings of the admission queue are those of `DecisionRules`, with the same names; None is any number. Two more
    turns sort the whole queue by what is late, which is a request that was held for `late_s`. A caller waits for a
    placement for `max_wait_s`; None is any time.
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
    admission_turn: str = ARRIVAL_TURN
    tenant_weights: tuple[tuple[str, float], ...] = ()
    max_held: int | None = None
    max_held_tokens: int | None = None
    max_held_of_tenant: int | None = None
    max_held_best_effort: int | None = None
    max_held_real_time: int | None = None
    best_effort_share: float = 0.05
    max_wait_s: float | None = None
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
            require_number(name, getattr(self, name))
        require_flag("reservations", self.reservations)
        require_choice("residual", self.residual, tuple(RESIDUALS))
        require_choice("prefix_view", self.prefix_view, (ENGINE_CACHE, SENT_INDEX))
        require_number("hop_s", self.hop_s, at_least=MIN_HOP_S)
        self._require_queue()

    def _require_queue(self) -> None:
        """Reject settings of the admission queue that are out of range."""
        require_choice("admission_turn", self.admission_turn, TURNS)
        require_number("late_s", self.late_s, above=0, infinite=True)
        require_share("best_effort_share", self.best_effort_share)
        for name in HELD_LIMITS:
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), at_least=0)
        if self.max_wait_s is not None:
            require_number("max_wait_s", self.max_wait_s)
        for tenant, weight in self.tenant_weights:
            require_string("tenant_weights", tenant)
            require_number(f"tenant_weights.{tenant}", weight, above=0)

    @property
    def has_fresh_indicators(self) -> bool:
        """Whether indicators are always current."""
        return self.indicator_period_s == 0 and self.indicator_delay_s == 0


CONDITION_NAMES = tuple(spec.name for spec in fields(Conditions))


def with_new_names(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of conditions with the present names in place of older ones."""
    table = dict(conditions)
    for old, new in OLD_NAMES.items():
        if old in table and new in table:
            raise ValueError(f"conditions.{old}: is the old name of {new}, which is there as well")
        if old in table:
            table[new] = table.pop(old)
    turn = table.get("admission_turn")
    if isinstance(turn, str):
        table["admission_turn"] = OLD_TURNS.get(turn, turn)
    return table


def require_outages(outages: Sequence[Outage], num_instances: int) -> None:
    """Reject outages of unknown instances, and outages of one instance that overlap."""
    for outage in outages:
        if outage.instance >= num_instances:
            raise ValueError(
                f"outage.instance: must be below {num_instances}, the number of instances, not {outage.instance}"
            )
    by_instance = sorted(outages, key=lambda outage: (outage.instance, outage.from_s))
    for one, other in pairwise(by_instance):
        if one.instance == other.instance and other.from_s < one.until_s:
            raise ValueError(f"outage.from_s: instance {one.instance} is already down at {other.from_s:g} s")
