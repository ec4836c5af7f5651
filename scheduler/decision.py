"""The decision for one request: a state machine without I/O.

A driver starts a decision and carries out the intention that it returns; it feeds back the result and gets the next
intention, until the request is placed or shed:

    start(now)      the first intention; `scheduler/intentions.py` has all of them, and what each gets back
    cancel(now)     the caller left

Drivers are the gRPC scheduler, a gateway that decides in its process, and the simulator. What an attempt finds is in
`scheduler/comparison.py`, and how the request waits in `scheduler/admission/wait.py`. A request that may have two legs
is decided by the subclass in `scheduler/disaggregation.py`, with the same events and intentions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from predictor.forecast_result import OTHERS_KEPT, OTHERS_KEPT_AND_START, TO_THE_END
from predictor.request import DECODE, PREFILL, SERVE
from scheduler.admission.lateness import retry_after_s
from scheduler.admission.wait import AdmissionWait, NextStep
from scheduler.candidate import FALLBACK_ORDER, Candidate, CandidateStatus
from scheduler.candidates import Candidates
from scheduler.columns import Column
from scheduler.comparison import NONE, Comparison
from scheduler.explanation import Explanation, candidate_at, keep_indicators, keep_what_was_read
from scheduler.instances import NoInstanceError, OverloadedError, RolePool
from scheduler.intentions import NO_ANSWER, Answer, Ask, Intention, Placed, Reserve, Shed, Wait
from scheduler.objectives import SHED as SHED_LATE
from scheduler.placement import Leg, Placement, PlacementRequest
from scheduler.policy import Policy

if TYPE_CHECKING:
    from scheduler.core import SchedulerCore

POOL_OF = {PREFILL: RolePool.PREFILL, DECODE: RolePool.DECODE}  # where a leg alone is placed

# Of an instance in one of these states it is unknown whether it can reserve: it gets the request without a reservation.
PLACED_WITHOUT_RESERVATION = FALLBACK_ORDER.keys() - {CandidateStatus.NOT_SHORTLISTED}


class Decision:
    """The decision for one request; `comparison` is its last attempt, and `explanation` shows it."""

    admission: AdmissionWait | None = None  # of a policy that holds requests
    disaggregation = ""  # why the request has two legs, or not; empty where no instance has a role
    num_conflicts = 0
    reserved_for_s: float | None = None
    _compares = Comparison
    _pool: RolePool | None = None  # the instances of a role; None: all instances
    _asked: Ask | None = None  # for forecasts that have not arrived yet
    _has_verdicts = False  # forecasts say only which deadlines are kept
    _forecasts_chosen = False  # ask the chosen instance for a forecast also where the policy needs none
    _num_failed = 0  # reservations that failed
    _is_placed = False
    _placement: Placement | None = None

    def __init__(self, core: SchedulerCore, request: PlacementRequest, policy: Policy) -> None:
        """Prepare the decision for a request by a policy."""
        self.core = core
        self.request = request
        self.policy = policy
        self.comparison = self._compares(policy, core.instances)
        if request.leg != SERVE:
            self.comparison.leg, self._pool = request.leg, POOL_OF[request.leg]

    def _reset(self) -> None:
        """Discard the results of the last attempt."""
        self.comparison, self._asked = self._compares(self.policy, self.core.instances), None
        self.comparison.leg = self.request.leg
        if self.admission is not None:
            self.comparison.is_background = self.admission.is_background

    # Events.

    def start(self, now_s: float) -> Intention:
        """Start: compare instances, ask them, or join the admission queue behind others."""
        if not self.policy.holds or self.request.dry_run:
            return self._attempt(now_s)
        admission = self.admission = AdmissionWait(self.core, self.request, self.policy)
        if admission.may_be_deferred(now_s):
            try:
                admission.defer_if_long(self._known(now_s), now_s)
            except (ValueError, NoInstanceError) as error:
                return self._shed(error, now_s)
        self.comparison.is_background = admission.is_background
        return self._wait(now_s) if admission.is_behind_others else self._attempt(now_s)

    def answers(self, answers: Mapping[str, Answer], now_s: float) -> Intention:
        """Take the answers of the asked instances, by instance id; an instance without an answer is late."""
        self._has_verdicts = False  # sidecars forecast all times of the request
        asked, self._asked = self._asked, None
        comparison = self.comparison
        if asked is None:  # the chosen instance alone was asked
            comparison.answers = {comparison.chosen_id: answers.get(comparison.chosen_id, NO_ANSWER)}
            return self._reserve()
        comparison.take(asked, answers, now_s)
        self._rank(now_s)
        return self._decide(now_s)

    def answers_in_columns(self, columns: Sequence[Mapping[str, Column]], now_s: float) -> Intention:
        """Take the forecasts of all asked instances as columns, a mapping for each part of the fan-out.

        They have one value per candidate, in the order of `Ask`.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            self.comparison.chosen_columns = columns[0]
            return self._reserve()
        self.comparison.take_columns(asked.candidates, columns[0])
        return self._decide(now_s)

    def reserved(self, expires_in_s: float, now_s: float) -> Intention:
        """Take a reservation that was made."""
        return self._placed(expires_in_s, now_s)

    def released(self, now_s: float, *, confirmed: bool) -> Intention:
        """Take the end of a reservation; one that is not confirmed may still count."""
        del now_s, confirmed
        raise AssertionError("a request with one leg releases nothing")

    def conflict(self, answer: Answer, now_s: float) -> Intention:
        """Take a refusal because other reservations came first; the answer holds the forecast that includes them."""
        self.num_conflicts += 1
        if answer.status is not CandidateStatus.FORECAST or answer.forecast is None:
            return self._failed_at(answer.status, answer.note, now_s)
        self.comparison.take_conflict(answer)
        return self._decide(now_s)

    def reservation_failed(self, status: CandidateStatus, note: str, now_s: float, *, counts: bool = True) -> Intention:
        """Take a failed reservation; after too many that `counts`, the request is placed without a reservation."""
        self._num_failed += counts and status is not CandidateStatus.REFUSED
        return self._failed_at(status, note, now_s)

    def tick(self, now_s: float) -> Intention:
        """Try again while waiting, if it is this request's turn or its time is up."""
        assert self.admission is not None
        assert not self._is_placed
        if now_s < self.admission.wait_until_s:
            return Wait(self.admission.wait_until_s)
        return self._go_on(self.admission.next_step(now_s), now_s)

    def cancel(self, now_s: float) -> Sequence[str]:
        """End a decision whose caller has left; return the instances whose reservations are to be released."""
        if self.admission is not None:
            self.admission.leave(now_s)
        return ()

    def wake(self) -> bool:
        """Make a waiting decision due now; False where it is not waiting, or due already."""
        return self.is_waiting and self.admission is not None and self.admission.wake()

    @property
    def is_waiting(self) -> bool:
        """Whether it waits in the admission queue, and no attempt is under way."""
        return (
            self.admission is not None
            and self.admission.queue is not None
            and self.comparison.compared is None
            and self._asked is None
            and not self._is_placed
        )

    @property
    def deadlines_dropped(self) -> str:
        """Why the request dropped its deadlines, `late` or `deferred`; empty where it did not."""
        return "" if self.admission is None else self.admission.deadlines_dropped

    @property
    def wait_until_s(self) -> float:
        """When `tick` is due."""
        return math.inf if self.admission is None else self.admission.wait_until_s

    # From candidates to a choice.

    def _attempt(self, now_s: float) -> Intention:
        """Compare the instances as they are now, or ask them first."""
        core, policy, comparison = self.core, self.policy, self.comparison
        try:
            known = self._known(now_s)
        except (ValueError, NoInstanceError) as error:
            return self._shed(error, now_s)
        if self.admission is not None:
            worth_asking = self.admission.worth_asking(known, now_s)
            if worth_asking is None:
                return self._wait(now_s)
            known = worth_asking
        num_known = len(known)
        comparison.shortlisted = shortlisted = policy.shortlist(known) if num_known else known
        if policy.needs_forecast:
            return self._ask(shortlisted, now_s)
        comparison.compared = shortlisted
        if num_known:
            comparison.score()
            if core.rules.explains:
                keep_what_was_read(comparison)
        return self._decide(now_s)

    def _known(self, now_s: float) -> Candidates:
        """Return the healthy instances that may serve the request, as last reported; NoInstanceError if none may."""
        core, request, policy = self.core, self.request, self.policy
        instances, rows = core.instances, request.rows
        if not request.any_model:
            rows = instances.rows_of_model(request.model)
        if self._pool is not None:
            rows = instances.rows_in_pool(rows, self._pool)
        if instances.suspects or request.excluded:
            unhealthy = instances.unhealthy(rows, request.excluded, now_s)
            rows = instances.rows_without(rows, unhealthy)
            self.comparison.others = {candidate.instance_id: candidate for candidate in unhealthy}
        known = instances.table.candidates(request.indicators, now_s, rows)
        if policy.needs_prefix or policy.needs_session:
            core.look_up(request, policy, known)
        return known

    def _ask(self, shortlisted: Candidates, now_s: float) -> Intention:
        """Ask for forecasts; instances whose engine failed are asked too, but not compared."""
        comparison = self.comparison
        others: Sequence[str] = ()
        if comparison.others:
            failed = comparison.others.values()
            others = [one.instance_id for one in failed if one.status is CandidateStatus.NOT_QUERIED]
        if len(shortlisted) or others:
            until = self._until()
            self._has_verdicts = until != TO_THE_END
            with_delays = self.policy.needs_delays
            is_background = until in (OTHERS_KEPT, OTHERS_KEPT_AND_START)
            min_slack_s = self.policy.min_slack_s[self.request.indicators.late] if is_background else 0.0
            self._asked = Ask(shortlisted, others, with_delays, comparison.leg, comparison.in_s, until, min_slack_s)
            return self._asked
        comparison.compared = shortlisted
        return self._decide(now_s)

    def _until(self) -> int:
        """Return how far forecasts have to be simulated: to the end if a refusal has to say when to try again."""
        admission, objective = self.admission, self.request.objective
        if self.request.dry_run:
            return TO_THE_END
        if admission is None:
            return self.policy.until(background=False)
        if objective.when_late == SHED_LATE or (objective.is_best_effort and not admission.may_wait):
            return TO_THE_END
        return self.policy.until(background=admission.is_background)

    def _rank(self, now_s: float) -> None:
        """Score the forecasts that arrived, and keep what an explanation needs."""
        comparison = self.comparison
        if self.core.rules.explains:
            assert comparison.compared is not None
            keep_indicators(comparison, comparison.compared.instance_ids, now_s)
        comparison.rank_forecasts()

    def _decide(self, now_s: float) -> Intention:
        """Choose the best instance and reserve there; wait if no instance admits the request and it may wait."""
        comparison, admission = self.comparison, self.admission
        best = comparison.best()
        if admission is not None and comparison.admits is not None:
            admission.note_refusals(comparison, now_s)
        if best == NONE or comparison.never_finishes(best):
            fallback = comparison.best_fallback(now_s)
            if fallback is None and best == NONE:
                return self._none_left(now_s)
            if fallback is not None:
                return self._choose_fallback(fallback, now_s)
        if admission is not None and comparison.admits is not None and not comparison.admits[best]:
            step = admission.step_of_refused(comparison, now_s)
            if step is not NextStep.PLACE:
                return self._go_on(step, now_s)
        comparison.chosen = best
        return self._admit(best, now_s)

    def _go_on(self, step: NextStep, now_s: float) -> Intention:
        """Take the next step of a request that waits, or that no instance admits."""
        if step is NextStep.WAIT:
            return self._wait(now_s)
        if step is NextStep.REFUSE:
            assert self.admission is not None
            return self._refuse_for_now(self.admission.refused_because, now_s)
        if step is NextStep.SCORE_AGAIN and not self._has_verdicts:
            self.comparison.score()
            return self._decide(now_s)
        self._reset()
        return self._attempt(now_s)

    def _admit(self, best: int, now_s: float) -> Intention:
        """Ask the chosen instance for a reservation, or first for a forecast, or place the request without either."""
        if self.request.dry_run:
            return self._placed(None, now_s)
        comparison = self.comparison
        compared = comparison.compared
        assert compared is not None
        instances, rules = self.core.instances, self.core.rules
        if instances.suspects and (status := instances.by_id.get(compared.instance_id(best))) is not None:
            status.engine.allows(now_s)
        if self._num_failed >= rules.max_failed_reservations:
            return self._placed(None, now_s)
        asks = (rules.forecast_always or self._forecasts_chosen) and not self.policy.needs_forecast
        if asks and compared.instance_id(best) not in comparison.answers:
            return Ask(compared.only(np.array([best], np.intp)), (), False, *comparison.leg_at(best))
        return comparison.reservation(conditional=self.num_conflicts < rules.max_conflicts)

    def _reserve(self) -> Reserve:
        """Reserve at the chosen instance; after too many conflicts also if something has changed there."""
        return self.comparison.reservation(conditional=self.num_conflicts < self.core.rules.max_conflicts)

    # Instances that fail, or that no policy compared.

    def _failed_at(self, status: CandidateStatus, note: str, now_s: float) -> Intention:
        """Choose again without the instance that has just failed to reserve."""
        comparison = self.comparison
        chosen = comparison.chosen
        candidate = chosen if isinstance(chosen, Candidate) else candidate_at(comparison, chosen)
        candidate.status, candidate.note = status, f"when reserving: {note}"
        if not isinstance(chosen, Candidate):
            comparison.add_other(candidate)
            if comparison.forecasts:  # other reservations may have been made since
                comparison.rank_forecasts()
        return self._decide(now_s)

    def _choose_fallback(self, candidate: Candidate, now_s: float) -> Intention:
        """Choose an instance that no policy compared."""
        self.comparison.chosen = candidate
        if self.request.dry_run:
            return self._placed(None, now_s)
        status = self.core.instances.by_id.get(candidate.instance_id)
        if status is not None:
            status.engine.allows(now_s)
            if candidate.forecast is not None:
                candidate.num_reserved_since = status.versions.since(candidate.version, candidate.epoch)
        has_failed = self._num_failed >= self.core.rules.max_failed_reservations
        if has_failed or candidate.status in PLACED_WITHOUT_RESERVATION:
            return self._placed(None, now_s)
        return self._reserve()

    def _none_left(self, now_s: float) -> Intention:
        """Return the intention for the case that no instance is left."""
        return self._shed(self.explanation.refusal(), now_s)

    # Ends, and the wait before them.

    def _wait(self, now_s: float) -> Wait | Shed:
        """Wait in the admission queue: the first of a lane until its next attempt, the others for their turn."""
        admission, compared = self.admission, self.comparison.compared
        assert admission is not None
        if limit := admission.limit():
            return self._refuse_for_now(limit, now_s)
        admission.note_latest_start(compared)
        self._reset()
        if limit := admission.wait(self, compared, now_s):
            return self._refuse_for_now(limit, now_s)
        return Wait(now_s if admission.wait_until_s == -math.inf else admission.wait_until_s)

    def _refuse_for_now(self, reason: str, now_s: float) -> Shed:
        """Refuse the request, and say when a new attempt may succeed."""
        again_s = retry_after_s(self.core, self.request, self.comparison.compared, now_s)
        return self._shed(OverloadedError(reason, retry_after_s=again_s), now_s)

    def _shed(self, error: Exception, now_s: float) -> Shed:
        if self.admission is not None:
            self.admission.leave(now_s)
        return Shed(error, getattr(error, "retry_after_s", None))

    def _placed(self, reserved_for_s: float | None, now_s: float) -> Intention:
        """End with a placement."""
        del now_s
        self._is_placed = True
        self.reserved_for_s = reserved_for_s
        if not self.request.dry_run and (self.policy.needs_prefix or self.policy.needs_session):
            self.core.remember(self.request, self.policy, self.comparison.chosen_id)
        if self.admission is not None:
            self.admission.placed()
        return Placed(self)

    @property
    def placement(self) -> Placement:
        """Where the request goes, once it is placed."""
        assert self._is_placed
        if self._placement is None:
            self._placement = Placement(
                legs=self._legs(),
                policy=self.policy.text,
                basis=self.explanation.basis,
                decision=self,
                reserved_for_s=self.reserved_for_s,
                held_s=0.0 if self.admission is None else self.admission.held_s,
                num_conflicts=self.num_conflicts,
                disaggregation=self.disaggregation,
            )
        return self._placement

    def _legs(self) -> tuple[Leg, ...]:
        comparison = self.comparison
        return (Leg(self.request.leg, comparison.chosen_id, comparison.chosen_forecast, self.reserved_for_s),)

    @property
    def is_admitted(self) -> bool:
        """Whether the chosen instance admits the request by the policy's condition."""
        return self.comparison.is_admitted

    @property
    def is_admitted_in_time(self) -> bool:
        """Whether the policy keeps deadlines, and the chosen instance keeps those of the request by forecast."""
        has_deadlines = self.admission is not None and not self.admission.is_background
        return has_deadlines and self.policy.keeps_deadlines and self.is_admitted

    @property
    def explanation(self) -> Explanation:
        """The instances that were considered, with their values at the time of the decision."""
        return Explanation(self.comparison)
