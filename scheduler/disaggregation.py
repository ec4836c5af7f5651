"""The decision for a request that may be prefilled on one instance and decoded on another.

It is the decision of the instance that answers the request, for a decode leg or for the whole request, and contains the
decision of the prefill leg, each over the instances of its own pool. With a policy that reads forecasts:

    AskLegs(whole requests, prefill legs)     one fan-out; the prefill leg ends soonest on P
    Ask(decode legs)                          of legs that arrive when P has ended, and the hand-over took place
    Reserve(decode leg), Reserve(prefill leg) or Reserve(whole request), by one ranking of both

One P suffices for all decode instances, as a decode leg that arrives earlier does not end later. Other policies choose
an instance for the request, then decide whether it has two legs there, and choose an instance for its prefill leg.

Both legs are reserved together: without a reservation of the prefill leg, that of the decode leg is released, and the
request is placed as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predictor.forecast_result import TO_THE_END
from predictor.request import DECODE, SERVE
from scheduler.candidate import Candidate, CandidateStatus
from scheduler.columns import Column
from scheduler.comparison import NO_CANDIDATES
from scheduler.decision import Decision
from scheduler.explanation import Explanation, notes_of
from scheduler.instances import NoInstanceError, RolePool
from scheduler.intentions import Answer, Ask, AskLegs, Intention, Release, Reserve
from scheduler.pairs import PREDICTED, PairComparison
from scheduler.placement import Leg, Placement
from scheduler.prefill_leg import PrefillDecision
from scheduler.spec import ALWAYS, BY_FORECAST, DECODE_FIRST, NEVER, PREFILL_FIRST

if TYPE_CHECKING:
    from scheduler.core import SchedulerCore
    from scheduler.placement import PlacementRequest
    from scheduler.policy import Policy

WITHOUT_POOL = SERVE_WHOLE, REFUSE = "whole", "refuse"

# Why a request has two legs, or is served as a whole.
PAIR_BY_FORECAST = "pair_by_forecast"
PAIR_BY_CONDITION = "pair_by_condition"
PAIR_ALWAYS = "pair_always"
WHOLE_BY_FORECAST = "whole_by_forecast"
WHOLE_BY_CONDITION = "whole_by_condition"
WHOLE_NEVER = "whole_never"
WHOLE_BY_REQUEST = "whole_by_request"
WHOLE_NO_PREFILL = "whole_no_prefill"  # no instance of the model has role prefill
WHOLE_NO_DECODE = "whole_no_decode"  # none has role decode or both
WHOLE_PREFILL_DOWN = "whole_prefill_down"  # none with role prefill takes the request now
WHOLE_DECODE_DOWN = "whole_decode_down"
REASONS = (
    PAIR_BY_FORECAST,
    PAIR_BY_CONDITION,
    PAIR_ALWAYS,
    WHOLE_BY_FORECAST,
    WHOLE_BY_CONDITION,
    WHOLE_NEVER,
    WHOLE_BY_REQUEST,
    WHOLE_NO_PREFILL,
    WHOLE_NO_DECODE,
    WHOLE_PREFILL_DOWN,
    WHOLE_DECODE_DOWN,
)
REASON_OF_PAIR = {ALWAYS: PAIR_ALWAYS, BY_FORECAST: PAIR_BY_FORECAST, "": PAIR_BY_CONDITION}
REASON_OF_WHOLE = {ALWAYS: WHOLE_DECODE_DOWN, BY_FORECAST: WHOLE_BY_FORECAST, "": WHOLE_BY_CONDITION}

ROLES_OF = {RolePool.PREFILL: "role prefill", RolePool.DECODE: "role decode or both"}


class Awaits(Enum):
    """What a decision with two legs waits for, besides what any decision does."""

    NOTHING = "nothing"
    PREFILL = "forecasts of the prefill leg"
    LEGS = "forecasts of the prefill leg and of the whole request"
    DECODE = "forecasts of the decode leg"
    RESERVATION = "the reservation of the prefill leg"
    RELEASE = "the release of the decode leg"


class DisaggregatedDecision(Decision):
    """The decision for one request among instances with roles; `disaggregation` says why it has two legs, or not."""

    comparison: PairComparison
    _compares = PairComparison
    _prefill: PrefillDecision | None = None
    _awaits = Awaits.NOTHING
    _why_whole = ""  # no decode leg is considered any more
    _has_prefill = False
    _decode_reserved_s: float | None = None  # while the prefill leg is being reserved
    _left: Mapping[str, Candidate] = NO_CANDIDATES  # of the decode pool, before prefill instances were considered
    _given_up: Mapping[str, Candidate] = NO_CANDIDATES  # all that were considered before, for the explanation

    def __init__(self, core: SchedulerCore, request: PlacementRequest, policy: Policy) -> None:
        """Prepare the decision for a request by a policy."""
        super().__init__(core, request, policy)
        assert policy.legs is not None
        self._rules = policy.legs
        self._pool = RolePool.DECODE

    def _reset(self) -> None:
        super()._reset()
        self._pool = RolePool.DECODE
        self._prefill = self._decode_reserved_s = None
        self._awaits, self._why_whole = Awaits.NOTHING, ""

    # Events.

    def answers(self, answers: Mapping[str, Answer], now_s: float) -> Intention:
        """Take what the asked instances answered, by instance id; one that is missing is late."""
        awaits, self._awaits = self._awaits, Awaits.NOTHING
        if awaits is Awaits.PREFILL:
            assert self._prefill is not None
            return self._prefill_chosen(self._prefill.answers(answers, now_s), now_s)
        if awaits is Awaits.LEGS:
            assert self._prefill is not None
            prefill = self._prefill.answers(answers, now_s)
            self.comparison.take(self._answered(), answers, now_s)
            return self._ask_decode(prefill, now_s)
        if awaits is Awaits.DECODE:
            self.comparison.take_decode(self._answered().candidates, answers, now_s)
            self._rank(now_s)
            return self._decide(now_s)
        return super().answers(answers, now_s)

    def answers_in_columns(self, columns: Sequence[Mapping[str, Column]], now_s: float) -> Intention:
        """Take the forecasts of all asked instances as columns, a mapping for each part of the fan-out."""
        awaits, self._awaits = self._awaits, Awaits.NOTHING
        if awaits is Awaits.PREFILL:
            assert self._prefill is not None
            return self._prefill_chosen(self._prefill.answers_in_columns(columns, now_s), now_s)
        if awaits is Awaits.LEGS:
            assert self._prefill is not None
            prefill = self._prefill.answers_in_columns(columns[-1:], now_s)
            self.comparison.compared = whole = self._answered().candidates
            if len(columns) > 1:
                whole.add(columns[0])
            return self._ask_decode(prefill, now_s)
        if awaits is Awaits.DECODE:
            decode = self._answered().candidates
            decode.add(columns[0])
            self.comparison.compare_both(decode, [])
            self._rank(now_s)
            return self._decide(now_s)
        return super().answers_in_columns(columns, now_s)

    def _answered(self) -> Ask:
        """Return what was asked, and is answered now."""
        asked, self._asked = self._asked, None
        assert asked is not None
        return asked

    def reserved(self, expires_in_s: float, now_s: float) -> Intention:
        """Take a reservation that was made."""
        if self._awaits is not Awaits.RESERVATION:
            return super().reserved(expires_in_s, now_s)
        assert self._prefill is not None
        self._awaits = Awaits.NOTHING
        self._prefill.reserved(expires_in_s, now_s)
        return super()._placed(self._decode_reserved_s, now_s)

    def conflict(self, answer: Answer, now_s: float) -> Intention:
        """Take a refusal because other reservations came first; the answer holds the forecast that includes them."""
        if self._awaits is not Awaits.RESERVATION:
            return super().conflict(answer, now_s)
        assert self._prefill is not None
        return self._reserve_prefill(self._prefill.conflict(answer, now_s), now_s)

    def reservation_failed(self, status: CandidateStatus, note: str, now_s: float, *, counts: bool = True) -> Intention:
        """Take a reservation that was not made; one that `counts` brings the leg nearer to going without one."""
        if self._awaits is not Awaits.RESERVATION:
            return super().reservation_failed(status, note, now_s, counts=counts)
        assert self._prefill is not None
        return self._reserve_prefill(self._prefill.reservation_failed(status, note, now_s, counts=counts), now_s)

    def released(self, now_s: float, *, confirmed: bool) -> Intention:
        """Take the end of a reservation; where it is not confirmed, the request does not go there again."""
        assert self._awaits is Awaits.RELEASE
        if not confirmed:
            self.request.excluded = {*self.request.excluded, self.comparison.chosen_id}
        return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)

    def cancel(self, now_s: float) -> Sequence[str]:
        """End a decision whose caller has left; return the instances whose reservations are to be released."""
        super().cancel(now_s)
        return () if self._decode_reserved_s is None or self._is_placed else (self.comparison.chosen_id,)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits in the admission queue, and no attempt is under way."""
        return super().is_waiting and self._awaits is Awaits.NOTHING

    # From candidates to a choice.

    def _attempt(self, now_s: float) -> Intention:
        """Compare the instances of both pools as they are now, or ask them first."""
        self._reset()
        self._left = self._given_up = NO_CANDIDATES
        instances, request = self.core.instances, self.request
        try:
            rows = request.rows if request.any_model else instances.rows_of_model(request.model)
        except (ValueError, NoInstanceError) as error:
            return self._shed(error, now_s)
        self._has_prefill = not _is_empty(instances.rows_in_pool(rows, RolePool.PREFILL))
        if _is_empty(instances.rows_in_pool(rows, RolePool.DECODE)):
            return self._without_decode(WHOLE_NO_DECODE, now_s)
        if self._has_one_leg():
            return self._attempt_whole(WHOLE_BY_REQUEST if request.undivided else WHOLE_NEVER, now_s)
        if not self._has_prefill:
            return self._without_prefill(WHOLE_NO_PREFILL, now_s)
        if self.policy.needs_forecast:
            return self._ask_legs(now_s)
        if self._rules.order == PREFILL_FIRST:
            return self._choose_prefill(now_s)
        return super()._attempt(now_s)

    def _attempt_whole(self, why: str, now_s: float) -> Intention:
        """Place the request as a whole from now on."""
        self._serve_whole(why)
        return super()._attempt(now_s)

    def _serve_whole(self, why: str) -> None:
        """Consider no decode leg any more."""
        self._why_whole, self._prefill, self.comparison.prefill = why, None, None

    def _without_prefill(self, why: str, now_s: float) -> Intention:
        """Go on without prefill instances, if that is allowed."""
        failed = [] if self._prefill is None else self._prefill.explanation.candidates()
        self._reset()
        if self.core.rules.without_pool == REFUSE:
            return self._refuse(RolePool.PREFILL, failed, now_s)
        self._given_up = {one.instance_id: one for one in failed}
        return self._attempt_whole(why, now_s)

    def _without_decode(self, why: str, now_s: float) -> Intention:
        """Serve the whole request on a prefill instance, if that is allowed."""
        left = self.comparison.others
        self._reset()
        if self.core.rules.without_pool == REFUSE:
            return self._refuse(RolePool.DECODE, list(left.values()), now_s)
        self._pool, self._left = RolePool.PREFILL, left
        self._given_up = {**self._given_up, **left}
        return self._attempt_whole(why, now_s)

    def _refuse(self, pool: RolePool, candidates: Sequence[Candidate], now_s: float) -> Intention:
        reason = f"can take the request: {notes_of(candidates)}" if candidates else "serves the model"
        return self._shed(NoInstanceError(f"no instance with {ROLES_OF[pool]} {reason}"), now_s)

    # By forecasts.

    def _until(self) -> int:
        """Return how far forecasts have to be simulated: the times of a leg are those of the next."""
        return TO_THE_END

    def _ask_legs(self, now_s: float) -> Intention:
        """Ask prefill instances about the prefill leg, and others about the whole request, in one fan-out."""
        asked = self._start_prefill(now_s, forecasts=True)
        if not isinstance(asked, Ask):
            return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)
        asked = asked._replace(with_delays=asked.with_delays or self.policy.needs_delays)
        if self._rules.disaggregate == ALWAYS:
            self._awaits = Awaits.PREFILL
            return asked
        intention = super()._attempt(now_s)
        if self._asked is None or self._prefill is None:  # it waits, or the pool is down
            return intention
        if self._rules.condition is not None:
            candidates = self._asked.candidates
            applies = self._rules.applies_to(candidates)
            if not applies.any():
                self._serve_whole(WHOLE_BY_CONDITION)
                return intention
            self.comparison.to_decode = candidates.only(np.flatnonzero(applies))
            self._asked = self._asked._replace(candidates=candidates.only(np.flatnonzero(~applies)))
        self._awaits = Awaits.LEGS
        return AskLegs((self._asked, asked) if len(self._asked.candidates) or self._asked.others else (asked,))

    def _ask_decode(self, prefill: Intention, now_s: float) -> Intention:
        """Ask about the decode leg that follows the best prefill leg."""
        comparison = self.comparison
        candidates = comparison.decode_candidates()
        if not self._arrives_after(prefill):
            if comparison.to_decode is not None or self.core.rules.without_pool == REFUSE:
                return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)
            self._serve_whole(WHOLE_PREFILL_DOWN)
        elif len(candidates):
            if self._rules.order == DECODE_FIRST:
                self._rank(now_s)
                candidates = candidates.only(np.array([comparison.best()], np.intp))
            known = {name: column for name, column in candidates.columns.items() if name not in PREDICTED}
            candidates = replace(candidates, columns=known)
            self._asked = Ask(candidates, (), self.policy.needs_delays, DECODE, comparison.arrives_s)
            self._awaits = Awaits.DECODE
            return self._asked
        self._rank(now_s)
        return self._decide(now_s)

    def _rank(self, now_s: float) -> None:
        comparison = self.comparison
        if comparison.forecasts is not None:
            super()._rank(now_s)
            return
        assert comparison.compared is not None
        comparison.complete(comparison.compared)
        comparison.score()

    def _arrives_after(self, prefill: Intention) -> bool:
        """Return whether the prefill leg can be reserved and ends, and keep when the decode leg arrives then."""
        assert self._prefill is not None
        if not isinstance(prefill, Reserve):
            return False
        return self.comparison.arrives_after(self._prefill.comparison, self.core.hand_over_s)

    # By indicators.

    def _start_prefill(self, now_s: float, *, forecasts: bool) -> Intention:
        self._prefill = PrefillDecision(self.core, self.request, self._rules.prefill, forecasts=forecasts)
        self.comparison.prefill = self._prefill.comparison
        return self._prefill.start(now_s)

    def _choose_prefill(self, now_s: float) -> Intention:
        """Choose an instance for the prefill leg."""
        intention = self._start_prefill(now_s, forecasts=False)
        if isinstance(intention, Ask):
            self._awaits = Awaits.PREFILL
            return intention
        return self._prefill_chosen(intention, now_s)

    def _prefill_chosen(self, prefill: Intention, now_s: float) -> Intention:
        """Go on with the instance of the prefill leg known, where no whole request is forecast."""
        assert self._prefill is not None
        arrives = self._arrives_after(prefill)
        if self.policy.needs_forecast:
            if not arrives:
                return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)
            self.comparison.decode_only()
            return super()._attempt(now_s)
        if not isinstance(prefill, Reserve):
            return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)
        if self._rules.order == DECODE_FIRST:
            return super()._admit(self.comparison.position, now_s)
        if not self._prefill.applies(self._rules):
            return self._attempt_whole(WHOLE_BY_CONDITION, now_s)
        self.comparison.decode_only()
        return super()._attempt(now_s)

    def _admit(self, best: int, now_s: float) -> Intention:
        """Decide whether the request has two legs on the chosen instance, if forecasts did not."""
        comparison = self.comparison
        if not (self._why_whole or comparison.leg == DECODE or self.policy.needs_forecast):
            assert comparison.compared is not None
            if comparison.is_decode is None:
                comparison.is_decode = self._rules.applies_to(comparison.compared)
            if comparison.is_decode[best] and self._prefill is None:
                return self._choose_prefill(now_s)
        return super()._admit(best, now_s)

    # Both reservations.

    def _placed(self, reserved_for_s: float | None, now_s: float) -> Intention:
        """Reserve the prefill leg as well, or end with a placement."""
        rule = self._rules.disaggregate
        if not self.comparison.chose_pair:
            self.disaggregation = self._why_whole or REASON_OF_WHOLE[rule]
            return super()._placed(reserved_for_s, now_s)
        self.disaggregation = REASON_OF_PAIR[rule]
        if self.request.dry_run:
            return super()._placed(None, now_s)
        assert self._prefill is not None
        self._decode_reserved_s = reserved_for_s
        return self._reserve_prefill(self._prefill.choose_again(now_s), now_s)

    def _reserve_prefill(self, prefill: Intention, now_s: float) -> Intention:
        """Reserve the prefill leg; give up the decode leg where that is impossible."""
        if isinstance(prefill, Reserve):
            self._awaits = Awaits.RESERVATION
            return prefill._replace(held_s=self.comparison.blocks_held_s())
        if self._decode_reserved_s is None:
            return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)
        self._awaits = Awaits.RELEASE
        return Release(self.comparison.chosen_id)

    # Pools that are down.

    def _choose_fallback(self, candidate: Candidate, now_s: float) -> Intention:
        """Choose an instance that no policy compared, after the instances of the other pool."""
        if candidate.status is CandidateStatus.NOT_SHORTLISTED:
            return super()._choose_fallback(candidate, now_s)
        if self._may_leave_pool():
            return self._without_decode(WHOLE_DECODE_DOWN, now_s)
        return super()._choose_fallback(self._with_left(now_s) or candidate, now_s)

    def _none_left(self, now_s: float) -> Intention:
        """Go on where no instance of the pool is left."""
        if self._may_leave_pool():
            return self._without_decode(WHOLE_DECODE_DOWN, now_s)
        fallback = self._with_left(now_s)
        return super()._none_left(now_s) if fallback is None else super()._choose_fallback(fallback, now_s)

    def _may_leave_pool(self) -> bool:
        """Whether prefill instances may serve the whole request instead, or have to be refused."""
        if self._pool is not RolePool.DECODE:
            return False
        if self.core.rules.without_pool == REFUSE:
            return not self._has_one_leg()
        return self._has_prefill

    def _has_one_leg(self) -> bool:
        """Return whether the request is served as a whole, whatever the instances report."""
        return self.request.undivided or self._rules.disaggregate == NEVER

    def _with_left(self, now_s: float) -> Candidate | None:
        """Return the best of both pools that no policy compared."""
        if not self._left:
            return None
        self.comparison.others, self._left = {**self._left, **self.comparison.others}, NO_CANDIDATES
        return self.comparison.best_fallback(now_s)

    # The placement, and its explanation.

    @property
    def placement(self) -> Placement:
        """Where the request goes, once it is placed."""
        if self._placement is None and self._prefill is not None and self.comparison.chose_pair:
            super().placement.num_conflicts += self._prefill.num_conflicts
        return super().placement

    def _legs(self) -> tuple[Leg, ...]:
        comparison = self.comparison
        if self._prefill is None or not comparison.chose_pair:
            return (Leg(SERVE, comparison.chosen_id, comparison.chosen_forecast, self.reserved_for_s),)
        prefill = self._prefill.leg()
        decode_forecast = comparison.decode_forecast(prefill.forecast)
        return prefill, Leg(DECODE, comparison.chosen_id, decode_forecast, self.reserved_for_s)

    @property
    def explanation(self) -> Explanation:
        """The instances that it considered for both legs."""
        prefill = None if self._prefill is None else self._prefill.explanation
        return Explanation(self.comparison, prefill, self._given_up)


def _is_empty(rows: npt.NDArray[np.intp] | None) -> bool:
    return rows is not None and len(rows) == 0
