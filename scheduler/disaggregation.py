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

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predictor.forecast_result import TO_THE_END, Forecast
from predictor.request import DECODE, PREFILL, SERVE
from scheduler.candidate import FORECAST_FIELDS, Candidate, CandidateStatus
from scheduler.candidates import Candidates
from scheduler.decision import EMPTY, NO_CANDIDATES, NONE, Decision, rows_of
from scheduler.indicators import Column
from scheduler.instances import NoInstanceError, RolePool
from scheduler.intentions import NO_ANSWER, Answer, Ask, AskLegs, Intention, Release, Reserve
from scheduler.placement import Leg, Placement
from scheduler.spec import ALWAYS, BY_FORECAST, DECODE_FIRST, NEVER, PREFILL_FIRST

if TYPE_CHECKING:
    from scheduler.candidates import Rows
    from scheduler.core import SchedulerCore
    from scheduler.placement import PlacementRequest
    from scheduler.policy import LegRules, Policy

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
SUMMED = ("delay_sum_s", "others_preempted", "others_missed", "gain_before", "gain_after")  # over both legs
PREDICTED = FORECAST_FIELDS.keys() - {"prefix_hit_tokens"}
GONE = (CandidateStatus.DOWN, CandidateStatus.STOPPED, CandidateStatus.DRAINING)


class Awaits(Enum):
    """What a decision with two legs waits for, besides what any decision does."""

    NOTHING = "nothing"
    PREFILL = "forecasts of the prefill leg"
    LEGS = "forecasts of the prefill leg and of the whole request"
    DECODE = "forecasts of the decode leg"
    RESERVATION = "the reservation of the prefill leg"
    RELEASE = "the release of the decode leg"


class PrefillDecision(Decision):
    """The decision of a prefill leg, which a decision with two legs carries out; it never waits."""

    _may_ask = True

    def __init__(self, core: SchedulerCore, request: PlacementRequest, policy: Policy, *, forecasts: bool) -> None:
        """Prepare it; with `forecasts` the chosen instance forecasts the leg whatever the policy reads."""
        super().__init__(core, replace(request, leg=PREFILL, dry_run=False), policy)
        self._forecasts_anyway = forecasts

    def choose_again(self, now_s: float) -> Intention:
        """Choose once more before the reservation; from then on without asking, while the decode leg is reserved."""
        self._may_ask = False
        return super().choose_again(now_s)

    def _admit(self, best: int, now_s: float) -> Intention:
        intention = super()._admit(best, now_s)
        if self._may_ask or not isinstance(intention, Ask):
            return intention
        assert self._compared is not None
        self._answers = EMPTY  # of another instance
        return self._reserve(self._compared.instance_id(best), self._compared.row(best))

    def leg(self) -> Leg:
        """Return the leg as it is placed."""
        return self._legs()[0]

    def applies(self, rules: LegRules) -> bool:
        """Return whether a request with its prefill leg on the chosen instance has two legs."""
        if self._compared is None or self.position == NONE:
            return rules.condition is None
        return bool(rules.applies_to(self._compared)[self.position])


class DisaggregatedDecision(Decision):
    """The decision for one request among instances with roles; `disaggregation` says why it has two legs, or not."""

    _prefill: PrefillDecision | None = None
    _awaits = Awaits.NOTHING
    _why_whole = ""  # no decode leg is considered any more
    _is_decode: npt.NDArray[np.bool_] | None = None  # by position among the compared
    _to_decode: Candidates | None = None  # those that are asked about a decode leg only
    _end_s = _arrives_s = 0.0  # until the prefill leg ends, and until the decode leg arrives
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
        self._prefill = self._is_decode = self._to_decode = self._decode_reserved_s = None
        self._awaits, self._why_whole = Awaits.NOTHING, ""
        self._leg, self._in_s, self._end_s, self._arrives_s = SERVE, 0.0, 0.0, 0.0

    # Events.

    def answers(self, answers: Mapping[str, Answer], now_s: float) -> Intention:
        """Take what the asked instances answered, by instance id; one that is missing is late."""
        awaits, self._awaits = self._awaits, Awaits.NOTHING
        if awaits is Awaits.PREFILL:
            assert self._prefill is not None
            return self._prefill_chosen(self._prefill.answers(answers, now_s), now_s)
        if awaits is Awaits.LEGS:
            return self._legs_answered(answers, now_s)
        if awaits is Awaits.DECODE:
            return self._decode_answered(answers, now_s)
        return super().answers(answers, now_s)

    def answers_in_columns(self, columns: Sequence[Mapping[str, Column]], now_s: float) -> Intention:
        """Take the forecasts of all asked instances as columns, a mapping for each part of the fan-out."""
        awaits, self._awaits = self._awaits, Awaits.NOTHING
        if awaits is Awaits.PREFILL:
            assert self._prefill is not None
            return self._prefill_chosen(self._prefill.answers_in_columns(columns, now_s), now_s)
        if awaits is Awaits.LEGS:
            return self._legs_in_columns(columns, now_s)
        if awaits is Awaits.DECODE:
            assert self._asked is not None
            decode, self._asked = self._asked.candidates, None
            decode.add(columns[0])
            return self._compare(decode, [], now_s)
        return super().answers_in_columns(columns, now_s)

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
            self.request = replace(self.request, excluded={*self.request.excluded, self._chosen_id()})
        return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)

    def cancel(self, now_s: float) -> Sequence[str]:
        """Nobody waits for the decision any more; return the instances whose reservations are to be released."""
        super().cancel(now_s)
        return () if self._decode_reserved_s is None or self._is_placed else (self._chosen_id(),)

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
            return self._attempt_whole(WHOLE_BY_REQUEST if self.request.undivided else WHOLE_NEVER, now_s)
        if not self._has_prefill:
            return self._without_prefill(WHOLE_NO_PREFILL, now_s)
        if self.policy.needs_forecast:
            return self._ask_legs(now_s)
        if self._rules.order == PREFILL_FIRST:
            return self._choose_prefill(now_s)
        return super()._attempt(now_s)

    def _attempt_whole(self, why: str, now_s: float) -> Intention:
        """Place the request as a whole from now on."""
        self._why_whole = why
        return super()._attempt(now_s)

    def _without_prefill(self, why: str, now_s: float) -> Intention:
        """Go on without prefill instances, if that is allowed."""
        failed = [] if self._prefill is None else self._prefill.candidates()
        self._reset()
        if self.core.rules.without_pool == REFUSE:
            return self._refuse(RolePool.PREFILL, failed, now_s)
        self._given_up = {one.instance_id: one for one in failed}
        return self._attempt_whole(why, now_s)

    def _without_decode(self, why: str, now_s: float) -> Intention:
        """Serve the whole request on a prefill instance, if that is allowed."""
        left = self._others
        self._reset()
        if self.core.rules.without_pool == REFUSE:
            return self._refuse(RolePool.DECODE, list(left.values()), now_s)
        self._pool, self._left = RolePool.PREFILL, left
        self._given_up = {**self._given_up, **left}
        return self._attempt_whole(why, now_s)

    def _refuse(self, pool: RolePool, candidates: Sequence[Candidate], now_s: float) -> Intention:
        notes = "; ".join(f"{one.instance_id}: {one.note}" for one in candidates[:8])
        reason = f"can take the request: {notes}" if notes else "serves the model"
        return self._shed(NoInstanceError(f"no instance with {ROLES_OF[pool]} {reason}"), now_s)

    def _prefill_decision(self, *, forecasts: bool) -> PrefillDecision:
        self._prefill = PrefillDecision(self.core, self.request, self._rules.prefill, forecasts=forecasts)
        return self._prefill

    # By forecasts.

    def _until(self) -> int:
        """Return how far forecasts have to be simulated: the times of a leg are those of the next."""
        return TO_THE_END

    def _ask_legs(self, now_s: float) -> Intention:
        """Ask prefill instances about the prefill leg, and others about the whole request, in one fan-out."""
        prefill = self._prefill_decision(forecasts=True)
        asked = prefill.start(now_s)
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
                self._why_whole, self._prefill = WHOLE_BY_CONDITION, None
                return intention
            self._to_decode = candidates.only(np.flatnonzero(applies))
            self._asked = self._asked._replace(candidates=candidates.only(np.flatnonzero(~applies)))
        self._awaits = Awaits.LEGS
        return AskLegs((self._asked, asked) if len(self._asked.candidates) or self._asked.others else (asked,))

    def _legs_answered(self, answers: Mapping[str, Answer], now_s: float) -> Intention:
        assert self._prefill is not None
        prefill = self._prefill.answers(answers, now_s)
        self._compared, self._forecasts = self._take(answers, now_s)
        return self._ask_decode(prefill, now_s)

    def _legs_in_columns(self, columns: Sequence[Mapping[str, Column]], now_s: float) -> Intention:
        assert self._prefill is not None
        assert self._asked is not None
        prefill = self._prefill.answers_in_columns(columns[-1:], now_s)
        self._compared, self._asked = self._asked.candidates, None
        if len(columns) > 1:
            self._compared.add(columns[0])
        return self._ask_decode(prefill, now_s)

    def _ask_decode(self, prefill: Intention, now_s: float) -> Intention:
        """Ask about the decode leg that follows the best prefill leg."""
        assert self._compared is not None
        candidates = self._compared if self._to_decode is None else self._to_decode
        if not self._arrives_after(prefill):
            if self._to_decode is not None or self.core.rules.without_pool == REFUSE:
                return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)
            self._why_whole, self._prefill = WHOLE_PREFILL_DOWN, None
        elif len(candidates):
            if self._rules.order == DECODE_FIRST:
                self._rank(now_s)
                candidates = candidates.only(np.array([self._best()], np.intp))
                self._order = None
            known = {name: column for name, column in candidates.columns.items() if name not in PREDICTED}
            candidates = replace(candidates, columns=known)
            self._asked = Ask(candidates, (), self.policy.needs_delays, DECODE, self._arrives_s)
            self._awaits = Awaits.DECODE
            return self._asked
        self._rank(now_s)
        return self._decide(now_s)

    def _decode_answered(self, answers: Mapping[str, Answer], now_s: float) -> Intention:
        """Compare decode legs and whole requests; an instance that was late the second time may serve the latter."""
        assert self._asked is not None
        assert self._compared is not None
        asked, self._asked = self._asked.candidates, None
        known, kept, forecasts = set(self._compared.instance_ids), [], []
        for position, name in enumerate(asked.instance_ids):
            answer = answers.get(name, NO_ANSWER)
            if answer.status is CandidateStatus.FORECAST:
                kept.append(position)
                forecasts.append(answer)
            elif name not in known or answer.status in GONE:
                self._set_aside(name, answer, now_s)
        decode = asked if len(kept) == len(asked) else asked.only(np.array(kept, np.intp))
        return self._compare(decode, forecasts, now_s)

    def _compare(self, decode: Candidates, forecasts: list[Answer], now_s: float) -> Intention:
        """Rank whole requests and decode legs together; of equal ones the whole request wins."""
        whole = self._compared
        assert whole is not None
        self._is_decode = np.arange(len(whole) + len(decode)) >= len(whole)
        columns = {
            name: np.concatenate((column, decode.columns[name]))
            for name, column in whole.columns.items()
            if name in decode.columns
        }
        self._compared = replace(
            whole,
            rows=np.concatenate((rows_of(whole), rows_of(decode))),
            columns=columns if len(whole) else dict(decode.columns),  # no instance was asked about whole requests
        )
        if self._forecasts is not None:
            self._forecasts = [*self._forecasts, *forecasts]
        self._scores = None
        self._rank(now_s)
        return self._decide(now_s)

    def _rank(self, now_s: float) -> None:
        assert self._compared is not None
        if self._forecasts is None:
            self._complete(self._compared)
            self._score()
            return
        if self.core.rules.explains:
            self._keep_indicators(self._compared.instance_ids, now_s)
        self._rank_forecasts()

    def _arrives_after(self, prefill: Intention) -> bool:
        """Return whether the prefill leg can be reserved and ends, and keep when the decode leg arrives then."""
        assert self._prefill is not None
        end_s = self._prefill.predicted("predicted_e2e_s") if isinstance(prefill, Reserve) else None
        if end_s is None or not math.isfinite(end_s):
            return False
        self._end_s, self._arrives_s = end_s, end_s + self.core.hand_over_s
        return True

    def _complete(self, compared: Candidates) -> None:
        """Count what the prefill leg does to others, and how long it waits, for every decode leg."""
        prefill, is_decode = self._prefill, self._decode_positions()
        if prefill is None or is_decode is None:
            return
        columns = compared.columns
        for name in (*SUMMED, "delay_worst_s", "least_slack_s", "predicted_queue_s"):
            value = prefill.predicted(name) if name in columns else None
            if value is None:
                continue
            column = columns[name]
            if name == "delay_worst_s":
                both = np.maximum(column, value)
            elif name == "least_slack_s":
                both = np.minimum(column, value)
            elif name == "predicted_queue_s":
                both = value + np.maximum(column - self._arrives_s, 0.0)
            else:
                both = column + value
            columns[name] = np.where(is_decode, both, column)

    def _decode_positions(self) -> npt.NDArray[np.bool_] | None:
        if self._leg == DECODE and self._compared is not None:
            return np.ones(len(self._compared), np.bool_)
        return self._is_decode

    # By indicators.

    def _choose_prefill(self, now_s: float) -> Intention:
        """Choose an instance for the prefill leg."""
        intention = self._prefill_decision(forecasts=False).start(now_s)
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
            self._leg, self._in_s = DECODE, self._arrives_s
            return super()._attempt(now_s)
        if not isinstance(prefill, Reserve):
            return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)
        if self._rules.order == DECODE_FIRST:
            return super()._admit(self.position, now_s)
        if not self._prefill.applies(self._rules):
            self._prefill = None
            return self._attempt_whole(WHOLE_BY_CONDITION, now_s)
        self._leg, self._in_s = DECODE, self._arrives_s
        return super()._attempt(now_s)

    def _admit(self, best: int, now_s: float) -> Intention:
        """Decide whether the request has two legs on the chosen instance, if forecasts did not."""
        if not (self._why_whole or self._leg == DECODE or self.policy.needs_forecast):
            assert self._compared is not None
            if self._is_decode is None:
                self._is_decode = self._rules.applies_to(self._compared)
            if self._is_decode[best] and self._prefill is None:
                return self._choose_prefill(now_s)
        return super()._admit(best, now_s)

    def _refused(self, admits: npt.NDArray[np.bool_], rows: Rows) -> npt.NDArray[np.bool_]:
        return ~np.isin(rows, rows[admits])  # an instance may admit the whole request, and no decode leg

    def _leg_at(self, position: int) -> tuple[str, float]:
        return (DECODE, self._arrives_s) if self._is_decode_at(position) else (SERVE, 0.0)

    def _reserve(self, instance_id: str, row: int) -> Reserve:
        leg, in_s = self._leg_at(self.position)
        return super()._reserve(instance_id, row)._replace(leg=leg, in_s=in_s)

    def _is_decode_at(self, position: int) -> bool:
        if position == NONE or self._why_whole or self._prefill is None:
            return False
        return self._leg == DECODE or (self._is_decode is not None and bool(self._is_decode[position]))

    # Both reservations.

    def _placed(self, reserved_for_s: float | None, now_s: float) -> Intention:
        """Reserve the prefill leg as well, or end with a placement."""
        rule = self._rules.disaggregate
        if not self._is_decode_at(self.position):
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
            return prefill._replace(held_s=self._blocks_held_s())
        if self._decode_reserved_s is None:
            return self._without_prefill(WHOLE_PREFILL_DOWN, now_s)
        self._awaits = Awaits.RELEASE
        return Release(self._chosen_id())

    def _blocks_held_s(self) -> float | None:
        """Return for how long the prefill instance is predicted to hold the KV blocks, if that is known."""
        forecast = self._chosen_forecast()
        if forecast is None or forecast.fetched_s is None or not math.isfinite(forecast.fetched_s):
            return None
        return max(0.0, forecast.fetched_s - self._end_s)

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
        self._others, self._left = {**self._left, **self._others}, NO_CANDIDATES
        return self._best_fallback(now_s)

    # The placement, and its explanation.

    @property
    def placement(self) -> Placement:
        """Where the request goes, once it is placed."""
        if self._placement is None and self._prefill is not None and self._is_decode_at(self.position):
            super().placement.num_conflicts += self._prefill.num_conflicts
        return super().placement

    def _legs(self) -> tuple[Leg, ...]:
        instance_id, forecast = self._chosen_id(), self._chosen_forecast()
        if self._prefill is None or not self._is_decode_at(self.position):
            return (Leg(SERVE, instance_id, forecast, self.reserved_for_s),)
        prefill = self._prefill.leg()
        if forecast is not None and prefill.forecast is not None:
            forecast = _postponed(forecast, prefill.forecast.e2e_s - self._end_s)
        return prefill, Leg(DECODE, instance_id, forecast, self.reserved_for_s)

    def ranking(self) -> list[str]:
        """Return all instances that may serve the request, best first."""
        return list(dict.fromkeys(super().ranking()))

    def skipped(self) -> list[Candidate]:
        """Return the instances that could not be compared, each with the reason."""
        skipped = [*super().skipped(), *([] if self._prefill is None else self._prefill.skipped())]
        named = {one.instance_id for one in self._considered()}
        failed = (one for one in self._given_up.values() if one.instance_id not in named)
        return [*skipped, *(one for one in failed if one.status is not CandidateStatus.NOT_SHORTLISTED)]

    def candidates(self) -> list[Candidate]:
        """Return all instances as the decision saw them, by id; those asked about the prefill leg with that."""
        found = {one.instance_id: one for one in [*self._given_up.values(), *self._considered()]}
        return sorted(found.values(), key=lambda one: one.instance_id)

    def _considered(self) -> list[Candidate]:
        """Return the instances of this attempt."""
        return [*super().candidates(), *([] if self._prefill is None else self._prefill.candidates())]

    def forecasts(self) -> list[tuple[str, Forecast]]:
        """Return the forecasts of all compared instances: of those asked about two legs, that which ends earlier."""
        best: dict[str, Forecast] = {}
        for name, forecast in super().forecasts():
            if name not in best or forecast.e2e_s < best[name].e2e_s:
                best[name] = forecast
        return list(best.items())


def _is_empty(rows: npt.NDArray[np.intp] | None) -> bool:
    return rows is not None and len(rows) == 0


def _postponed(forecast: Forecast, seconds: float) -> Forecast:
    """Return the forecast of a decode leg that arrives later than it was made for."""
    if not 0 < seconds < math.inf:
        return forecast
    return replace(
        forecast,
        queue_s=forecast.queue_s + seconds,
        ttft_s=forecast.ttft_s + seconds,
        e2e_s=forecast.e2e_s + seconds,
        fetched_s=None if forecast.fetched_s is None else forecast.fetched_s + seconds,
    )
