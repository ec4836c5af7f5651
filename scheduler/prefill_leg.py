"""The decision of a prefill leg: a part of the decision for a request with two legs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from predictor.request import PREFILL
from scheduler.comparison import EMPTY, NONE
from scheduler.decision import Decision
from scheduler.intentions import Ask, Intention
from scheduler.placement import Leg

if TYPE_CHECKING:
    from scheduler.core import SchedulerCore
    from scheduler.placement import PlacementRequest
    from scheduler.policy import LegRules, Policy


class PrefillDecision(Decision):
    """The decision of a prefill leg, which a decision with two legs carries out; it never waits."""

    _may_ask = True

    def __init__(self, core: SchedulerCore, request: PlacementRequest, policy: Policy, *, forecasts: bool) -> None:
        """Prepare it; with `forecasts` the chosen instance forecasts the leg whatever the policy reads."""
        super().__init__(core, replace(request, leg=PREFILL, dry_run=False), policy)
        self._forecasts_chosen = forecasts

    def choose_again(self, now_s: float) -> Intention:
        """Choose once more before the reservation, as others may have been made since the answers.

        From then on it does not ask, while the decode leg is reserved.
        """
        self._may_ask = False
        self.comparison.rank_again()
        return self._decide(now_s)

    def _admit(self, best: int, now_s: float) -> Intention:
        intention = super()._admit(best, now_s)
        if self._may_ask or not isinstance(intention, Ask):
            return intention
        self.comparison.answers = EMPTY  # of another instance
        return self._reserve()

    def leg(self) -> Leg:
        """Return the leg as it is placed."""
        return self._legs()[0]

    def applies(self, rules: LegRules) -> bool:
        """Return whether a request with its prefill leg on the chosen instance has two legs."""
        compared, position = self.comparison.compared, self.comparison.position
        if compared is None or position == NONE:
            return rules.condition is None
        return bool(rules.applies_to(compared)[position])
