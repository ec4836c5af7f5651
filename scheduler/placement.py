"""The input and the output of a decision: a request to place, and the legs on which it runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from predictor.forecast_result import Forecast
from predictor.request import SERVE
from scheduler.candidates import RequestIndicators, Rows
from scheduler.columns import Column
from scheduler.objectives import NO_OBJECTIVE, Objective
from scheduler.prefix.prompt import NO_BLOCKS, PromptBlocks

if TYPE_CHECKING:
    from scheduler.decision import Decision


class DecisionBasis(Enum):
    """The information that a decision is based on."""

    FORECAST = "forecast"
    INDICATORS = "indicators"
    BLIND = "blind"  # the policy reads no state
    LAST_RESORT = "last_resort"  # no instance could be compared


@dataclass(slots=True, kw_only=True)
class PlacementRequest:
    """A request to be placed.

    `rows` limits the choice to some instances; by default those that serve the model. `prefix_hits` are the cached
    tokens of every instance where they are known exactly, else they are looked up by `blocks`. `number` orders waiting
    requests by arrival; the core counts by itself where it is negative.
    """

    request_id: str = ""
    model: str = ""
    indicators: RequestIndicators = field(default_factory=RequestIndicators)
    blocks: PromptBlocks = NO_BLOCKS
    prefix_hits: Column | None = None
    rows: Rows | None = None
    any_model: bool = False  # take `rows` as they are
    excluded: Collection[str] = ()
    dry_run: bool = False
    arrived_s: float = 0.0  # at this scheduler
    waited_s: float = 0.0  # before that
    max_wait_s: float = math.inf  # how long the caller waits for the decision
    number: int = -1
    leg: str = SERVE  # prefill or decode: only this leg is placed
    objective: Objective = NO_OBJECTIVE
    client_id: str = ""
    session_id: str = ""
    undivided: bool = False  # one instance serves it, whatever the policy says


def num_tokens_of(request: PlacementRequest) -> float:
    """Return the tokens of a request: of its prompt, and of its response as far as it is predicted."""
    tag_tokens = request.indicators.tag_tokens
    return request.indicators.prompt_tokens + (tag_tokens if tag_tokens > 0 else 0.0)


class Leg(NamedTuple):
    """One part of a request's way: `serve`, or `prefill` and then `decode`, on one instance."""

    kind: str
    instance_id: str
    forecast: Forecast | None = None
    reserved_for_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Placement:
    """Where a request goes, and the basis of that decision."""

    legs: tuple[Leg, ...]
    policy: str
    basis: DecisionBasis
    decision: Decision
    reserved_for_s: float | None = None
    held_s: float = 0.0  # in the admission queue
    decision_s: float = 0.0  # without that
    num_conflicts: int = 0
    disaggregation: str = ""  # why the request has two legs, or not; empty where no instance has a role

    @property
    def prefill(self) -> Leg | None:
        """The prefill leg of a request with two legs."""
        return self.legs[0] if len(self.legs) > 1 else None

    @property
    def instance_id(self) -> str:
        """The instance that answers the request: that of the last leg."""
        return self.legs[-1].instance_id

    @property
    def forecast(self) -> Forecast | None:
        """The forecast of the last leg."""
        return self.legs[-1].forecast

    @property
    def next_best(self) -> Sequence[str]:
        """The other instances that may serve the request, best first."""
        return [name for name in self.decision.explanation.ranking() if name != self.instance_id]
