"""The decision for one request: a state machine without I/O.

A driver starts a decision and carries out the intention that it returns; it feeds back the result and gets the next
intention, until the request is placed or shed:

    start(now)      the first intention; `scheduler/intentions.py` has all of them, and what each gets back
    cancel(now)     the caller left

Drivers are the gRPC scheduler, a gateway that decides in its process, and the simulator. A request that may have two
legs is decided by the subclass in `scheduler/disaggregation.py`, with the same events and intentions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from predictor.forecast_result import ALL_KEPT, OTHERS_KEPT, TO_THE_END, Forecast
from predictor.request import BEST_EFFORT, DECODE, PREFILL, SERVE, Slo
from scheduler.admission.order import WaitingRequest
from scheduler.admission.queue import AdmissionQueue, lane_of, retry_pause_s
from scheduler.candidate import (
    FALLBACK_ORDER,
    FORECAST_FIELDS,
    Candidate,
    CandidateStatus,
    delayed,
    fallback_key,
    forecast_columns,
)
from scheduler.candidates import Candidates, Rows
from scheduler.indicators import INDEX_OF, STRICTEST_S, Column
from scheduler.instances import (
    CLASS_LIMIT,
    LATE,
    QUEUE_FULL,
    TIMEOUT,
    NoInstanceError,
    OverloadedError,
    RolePool,
    age_of,
)
from scheduler.intentions import FORECAST_IN, NO_ANSWER, STATUS_OF, Answer, Ask, Intention, Placed, Reserve, Shed, Wait
from scheduler.objectives import DEMOTE
from scheduler.objectives import SHED as SHED_LATE
from scheduler.placement import DecisionBasis, Leg, Placement, PlacementRequest, num_tokens_of
from scheduler.policy import Policy
from scheduler.sessions import SESSION_HERE

if TYPE_CHECKING:
    from scheduler.core import SchedulerCore

FINISHED = INDEX_OF["num_finished_total"]
LASTING = {*INDEX_OF, SESSION_HERE}  # indicators that do not depend on forecasts
NONE = -1  # no position
POOL_OF = {PREFILL: RolePool.PREFILL, DECODE: RolePool.DECODE}  # where a leg alone is placed
NO_CANDIDATES: dict[str, Candidate] = {}  # never written to
EMPTY: Mapping[str, Any] = MappingProxyType({})
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 3600.0
MAX_PATIENT_S = 60.0  # of waiting for an instance where no other request would miss a deadline
MAX_EXPLAINED = 64  # instances compared by indicators whose other indicators are kept

# Of an instance in one of these states it is unknown whether it could reserve anything.
SENT_UNRESERVED = FALLBACK_ORDER.keys() - {CandidateStatus.NOT_SHORTLISTED}

BASIS_OF = {
    CandidateStatus.NOT_QUERIED: DecisionBasis.BLIND,
    CandidateStatus.INDICATORS: DecisionBasis.INDICATORS,
    CandidateStatus.FORECAST: DecisionBasis.FORECAST,
}


class Decision:
    """The decision for one request. `ranking` and `candidates` explain it, as things were when it was made."""

    # An attempt's state, as it is before the attempt: most decisions need little of it.
    _shortlisted: Candidates | None = None  # by the policy
    _compared: Candidates | None = None  # of these, what it compares
    _scores: Column | None = None
    _order: list[int] | None = None  # positions among the compared, best first
    _admits: np.ndarray | None = None
    _since: list[int] | None = None  # reservations made after each forecast
    _forecasts: list[Answer] | None = None  # of the compared; None where a driver gave columns
    _others: dict[str, Candidate] = NO_CANDIDATES  # what is not compared, or failed
    _chosen: Candidate | int = NONE
    _asked: Ask | None = None
    _reads: Mapping[str, Column] = EMPTY
    _answers: Mapping[str, Answer] = EMPTY
    _chosen_columns: Mapping[str, Column] = EMPTY  # of an instance that was chosen without a forecast
    _indicators: Mapping[str, tuple[Mapping[str, float], float, float, int]] = EMPTY  # age, time, `num_unseen`
    _indicators_s = 0.0  # the time at which these were kept

    # What instances are asked about.
    _pool: RolePool | None = None  # of all instances
    _leg = SERVE
    _in_s = 0.0  # until it arrives
    _has_verdicts = False  # forecasts say only which deadlines are kept
    _forecasts_anyway = False  # the chosen instance, where the policy does without forecasts

    # The decision's state.
    disaggregation = ""  # why the request has two legs, or not; empty where no instance has a role
    num_conflicts = 0
    reserved_for_s: float | None = None
    _num_failed = 0
    _is_placed = False
    _placement: Placement | None = None
    _queue: AdmissionQueue | None = None
    _joined_s = 0.0
    _held_s = 0.0
    _wait_until_s = math.inf
    _may_wait = False
    _leaves_because = QUEUE_FULL  # why it may not wait any longer
    _patient = False  # it is best effort, or late already, and must leave the deadlines of others alone
    _lane = 0  # of the admission queue
    _passing: Rows | None = None  # the instances that it may ask before its turn: they refused a longer request
    _asks_all = True  # also the instances that have just refused
    _latest_s = math.inf  # while it waits: when it may become too late to attain its deadlines

    def __init__(self, core: SchedulerCore, request: PlacementRequest, policy: Policy) -> None:
        """Prepare the decision for a request by a policy."""
        self.core = core
        self.request = request
        self.policy = policy
        self._number = request.number
        if request.leg != SERVE:
            self._pool, self._leg = POOL_OF[request.leg], request.leg

    def _reset(self) -> None:
        """Forget an attempt."""
        self._shortlisted = self._compared = self._scores = self._order = self._admits = self._since = None
        self._forecasts = self._asked = None
        self._others, self._chosen = NO_CANDIDATES, NONE
        self._reads, self._answers, self._indicators, self._chosen_columns = EMPTY, EMPTY, EMPTY, EMPTY

    # Events.

    def start(self, now_s: float) -> Intention:
        """Start: compare instances, ask them, or join the admission queue behind others."""
        if self.policy.holds and not self.request.dry_run:
            self._may_wait = True
            self._patient = self.request.objective.is_best_effort
            self._lane = lane_of(self.request.indicators.tpot_slo_s, patient=self._patient)
            queue = self.core.queue(self.request.model)
            if queue is not None and queue.has_lane(self._lane):
                return self._wait(now_s)
        return self._attempt(now_s)

    def answers(self, answers: Mapping[str, Answer], now_s: float) -> Intention:
        """Take what the asked instances answered, by instance id; one that is missing is late."""
        self._has_verdicts = False  # sidecars forecast to the end
        if self._asked is None:
            return self._reserve_with_forecast(answers)
        self._compared, self._forecasts = self._take(answers, now_s)
        if self.core.rules.explains:
            self._keep_indicators(self._compared.instance_ids, now_s)
        self._rank_forecasts()
        return self._decide(now_s)

    def _take(self, answers: Mapping[str, Answer], now_s: float) -> tuple[Candidates, list[Answer]]:
        """Return the candidates with a forecast and their answers; set the others aside."""
        assert self._asked is not None
        candidates, others = self._asked.candidates, self._asked.others
        self._asked = None
        self._answers = answers
        try:
            compared = list(map(answers.__getitem__, candidates.instance_ids))
        except KeyError:
            compared = [answers.get(name, NO_ANSWER) for name in candidates.instance_ids]
        for name in others:
            self._answer_of_other(self._others[name], answers.get(name, NO_ANSWER))
        if list(map(STATUS_OF, compared)).count(CandidateStatus.FORECAST) == len(compared):
            return candidates, compared
        for position, answer in enumerate(compared):
            if answer.status is not CandidateStatus.FORECAST:
                self._set_aside(candidates.instance_id(position), answer, now_s)
        kept = [position for position, answer in enumerate(compared) if answer.status is CandidateStatus.FORECAST]
        return candidates.only(np.array(kept, np.intp)), [compared[position] for position in kept]

    def answers_in_columns(self, columns: Sequence[Mapping[str, Column]], now_s: float) -> Intention:
        """Take the forecasts of all asked instances as columns, a mapping for each part of the fan-out.

        They have one value per candidate, in the order of `Ask`.
        """
        if self._asked is None:
            assert self._compared is not None
            self._chosen_columns = columns[0]
            return self._reserve(self._chosen_id(), self._compared.row(self.position))
        self._compared = self._asked.candidates
        self._asked = None
        self._compared.add(columns[0])
        self._score()
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
        chosen = self._chosen
        if answer.status is not CandidateStatus.FORECAST or answer.forecast is None:
            return self._failed_at(answer.status, answer.note, now_s)
        if isinstance(chosen, Candidate):
            chosen.version, chosen.epoch = answer.version, answer.epoch
            status = self.core.instances.by_id.get(chosen.instance_id)
            chosen.num_reserved_since = 0 if status is None else status.versions.since(answer.version, answer.epoch)
            chosen.forecast = _with_delays_of(chosen.forecast, answer.forecast)
        else:
            assert self._forecasts is not None
            before = self._forecasts[chosen].forecast
            self._forecasts[chosen] = answer._replace(forecast=_with_delays_of(before, answer.forecast))
        if self._forecasts is not None:
            self._rank_forecasts()
        return self._decide(now_s)

    def reservation_failed(self, status: CandidateStatus, note: str, now_s: float, *, counts: bool = True) -> Intention:
        """Take a reservation that was not made; one that `counts` brings the request nearer to going without one."""
        self._num_failed += counts and status is not CandidateStatus.REFUSED
        return self._failed_at(status, note, now_s)

    def choose_again(self, now_s: float) -> Intention:
        """Choose once more before the reservation, as others may have been made since the answers."""
        if (
            self._forecasts
            and self._compared is not None
            and self.core.instances.reserved_since(self._compared, self._forecasts) != self._since
        ):
            self._rank_forecasts()
        return self._decide(now_s)

    def predicted(self, name: str) -> float | None:
        """Return a field of the chosen instance's forecast by its indicator's name, if it is known."""
        chosen, columns = self._chosen, self._chosen_columns
        if name in columns:
            return columns[name].item(0)
        if isinstance(chosen, int) and self.policy.needs_forecast and self._compared is not None:
            column = self._compared.columns.get(name)
            if column is not None:
                return column.item(chosen)
        forecast = self._chosen_forecast()
        return None if forecast is None else FORECAST_FIELDS[name](forecast)

    def tick(self, now_s: float) -> Intention:
        """Try again while waiting, if it is this request's turn or its time is up."""
        assert self._queue is not None
        assert not self._is_placed
        if now_s < self._wait_until_s:
            return Wait(self._wait_until_s)
        self._wait_until_s = math.inf
        if self._queue.must_leave(self._number, now_s):
            self._may_wait = False
            self._leaves_because = TIMEOUT if self._queue.deadline_s(self._number) <= now_s else QUEUE_FULL
        elif self._passing is None and (head := self._queue.head(now_s, self._lane)) != self._number:
            self.core.wake(head)
            if now_s < self._latest_s:
                return self._wait(now_s)
            if not self._queue.may_overtake(self._number, head):
                return self._too_late(now_s)
        self._held_s = now_s - self._joined_s
        return self._attempt(now_s)

    def cancel(self, now_s: float) -> Sequence[str]:
        """Nobody waits for the decision any more; return the instances whose reservations are to be released."""
        if self._queue is not None:
            self._leave_queue(now_s)
        return ()

    def wake(self) -> bool:
        """Make a waiting decision due now; False where it is not waiting, or due already."""
        if self._queue is None or self._wait_until_s == -math.inf or not self.is_waiting:
            return False
        self._wait_until_s = -math.inf
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether it waits in the admission queue, and no attempt is under way."""
        return self._queue is not None and self._compared is None and self._asked is None and not self._is_placed

    @property
    def wait_until_s(self) -> float:
        """When it is to be ticked."""
        return self._wait_until_s

    @property
    def position(self) -> int:
        """The position of the chosen instance among the compared; -1 where the policy did not compare it."""
        return self._chosen if isinstance(self._chosen, int) else NONE

    @property
    def num_compared(self) -> int:
        """The number of instances that the policy compared."""
        return 0 if self._compared is None else len(self._compared)

    def held_s(self, now_s: float) -> float:
        """Return how long ago it joined the admission queue."""
        return now_s - self._joined_s

    @property
    def number(self) -> int:
        """Its number in the admission queue."""
        return self._number

    # From candidates to a choice.

    def _attempt(self, now_s: float) -> Intention:
        """Compare the instances as they are now, or ask them first."""
        core, request, policy = self.core, self.request, self.policy
        instances = core.instances
        rows = request.rows
        if not request.any_model:
            try:
                rows = instances.rows_of_model(request.model)
            except (ValueError, NoInstanceError) as error:
                return self._shed(error, now_s)
        if self._pool is not None:
            rows = instances.rows_in_pool(rows, self._pool)
        if instances.suspects or request.excluded:
            unhealthy = instances.unhealthy(rows, request.excluded, now_s)
            rows = instances.rows_without(rows, unhealthy)
            self._others = {candidate.instance_id: candidate for candidate in unhealthy}
        known = instances.table.candidates(request.indicators, now_s, rows)
        self._look_up(known)
        num_known = len(known)
        self._asks_all = True
        if self._may_wait and self._patient and self._yields(known):
            return self._wait(now_s)
        if self._may_wait and num_known and now_s < self._latest_s:  # one that may be late must know of all
            if not self._patient:
                known = policy.eligible(known)
                num_known = len(known)
            known = self._worth_asking(known, now_s)
            self._asks_all = len(known) == num_known
            num_known = len(known)
            if not num_known:
                return self._wait(now_s)
        self._shortlisted = shortlisted = policy.shortlist(known) if num_known else known
        if policy.needs_forecast:
            return self._ask(shortlisted, now_s)
        self._compared = shortlisted
        if num_known:
            self._score()
            if core.rules.explains:
                self._copy_read_indicators(shortlisted)
        return self._decide(now_s)

    def _look_up(self, known: Candidates) -> None:
        """Add what is known of the request's prompt, and of its session."""
        core, request = self.core, self.request
        if self.policy.needs_prefix:
            if request.prefix_hits is None:
                core.prefixes.look_up(request.blocks, known)
            else:
                hits, rows = request.prefix_hits, known.rows
                known.columns["prefix_hit_tokens"] = hits if rows is None else hits[rows]
        if self.policy.needs_session:
            core.sessions.look_up(request, known)

    def _ask(self, shortlisted: Candidates, now_s: float) -> Intention:
        """Ask for forecasts: also engines that failed, which are compared with none."""
        others: Sequence[str] = ()
        if self._others:
            others = [one.instance_id for one in self._others.values() if one.status is CandidateStatus.NOT_QUERIED]
        if len(shortlisted) or others:
            self._asked = Ask(shortlisted, others, self.policy.needs_delays, self._leg, self._in_s, self._until())
            self._has_verdicts = self._asked.until != TO_THE_END
            return self._asked
        self._compared = shortlisted
        return self._decide(now_s)

    def _until(self) -> int:
        """Return how far forecasts have to be simulated; a refusal says by the whole of them when to come again."""
        if not (self._may_wait and self.policy.needs_verdicts) or self.request.objective.when_late == SHED_LATE:
            return TO_THE_END
        return OTHERS_KEPT if self._patient else ALL_KEPT

    def _worth_asking(self, known: Candidates, now_s: float) -> Candidates:
        """Leave out the instances that have just refused, and where nothing has finished since."""
        if self._passing is not None:
            return known.only(np.flatnonzero(np.isin(rows_of(known), self._passing)), "was not asked before")
        refusals = self.core.refusals(self._lane)
        worth = refusals.worth_asking(known.known.reported[FINISHED][rows_of(known)], now_s, known.rows)
        return known if worth.all() else known.only(np.flatnonzero(worth), "admitted no request recently")

    def _yields(self, known: Candidates) -> bool:
        """Whether it waits for others that have a deadline to miss, and fit all instances that have a target."""
        request, queue = self.request, self.core.queue(self.request.model)
        if queue is None or not self.policy.keeps_deadlines:
            return False
        shares, rules = self.core.shares_of(request.model), self.core.rules
        if request.objective.is_best_effort and shares.is_below(rules.best_effort_share):
            return False
        targets_s = known["least_tpot_slo_s"]
        return queue.has_urgent(float(targets_s[targets_s < math.inf].max(initial=STRICTEST_S)), self._number)

    def _score(self) -> None:
        compared, policy = self._compared, self.policy
        assert compared is not None
        self._order = None
        self._scores = policy.scores(compared)
        if policy.holds:
            self._admits = policy.admits(compared, patient=self._patient)

    def _rank_forecasts(self) -> None:
        """Score by forecasts, corrected for the reservations that were made since; again after every conflict."""
        compared, answers, policy = self._compared, self._forecasts, self.policy
        assert compared is not None
        assert answers is not None
        if not answers:
            return
        self._since = self.core.instances.reserved_since(compared, answers)
        if self._scores is not None or policy.needs_prefix:  # what was derived from earlier forecasts is outdated
            compared = self._compared = replace(
                compared, columns={name: column for name, column in compared.columns.items() if name in LASTING}
            )
        compared.add(forecast_columns(self._predicted(), policy.forecast_columns))
        self._complete(compared)
        self._score()

    def _complete(self, compared: Candidates) -> None:
        """Add to the forecasts' columns what they do not know."""

    def _predicted(self) -> list[Forecast | None]:
        answers, since = self._forecasts or [], self._since or []
        if not any(since):
            return list(map(FORECAST_IN, answers))
        return [
            answer.forecast if not num or answer.forecast is None else delayed(answer.forecast, num)
            for answer, num in zip(answers, since, strict=True)
        ]

    def _decide(self, now_s: float) -> Intention:
        """Choose the best instance, and have it reserve the request; wait where none admits it and it may."""
        best = self._best()
        if self._admits is not None:
            self._note_refusals(now_s)
        if best == NONE or self._never_finishes(best):
            fallback = self._best_fallback(now_s)
            if fallback is None and best == NONE:
                return self._none_left(now_s)
            if fallback is not None:
                return self._choose_fallback(fallback, now_s)
        if self._admits is not None and not self._admits[best] and not self.request.dry_run:
            intention = self._not_admitted(now_s)
            if intention is not None:
                return intention
        self._chosen = best
        return self._admit(best, now_s)

    def _not_admitted(self, now_s: float) -> Intention | None:
        """Go on with a request that no instance admits now; None: it goes to the best instance all the same."""
        objective, keeps_deadlines = self.request.objective, self.policy.keeps_deadlines
        if self._is_late(now_s):
            return self._decide_late(now_s)
        if self.request.objective.is_best_effort and keeps_deadlines:
            if self.core.shares_of(self.request.model).is_below(self.core.rules.best_effort_share):
                return None
            return self._wait(now_s) if self._may_wait else self._refuse_for_now(self._leaves_because, now_s)
        if self._may_wait:
            return self._wait(now_s)
        if keeps_deadlines and objective.when_late == SHED_LATE:
            return self._refuse_for_now(self._leaves_because, now_s)
        if keeps_deadlines and objective.when_late == DEMOTE:
            self._demote()
        return None

    def _decide_late(self, now_s: float) -> Intention:
        """Go on with a request whose deadlines cannot be kept any more."""
        if self.request.objective.when_late == SHED_LATE:
            return self._refuse_for_now(LATE, now_s)
        self._give_up_deadlines()
        assert self._compared is not None
        if self._may_wait and self._yields(self._compared):
            return self._wait(now_s)
        if self._has_verdicts:
            self._reset()
            return self._attempt(now_s)
        self._score()
        return self._decide(now_s)

    def _is_late(self, now_s: float) -> bool:
        """Whether the request's deadlines cannot be kept any more, as far as `_latest_start_s` knows."""
        return self.policy.keeps_deadlines and not self._patient and now_s >= self._latest_start_s()

    def _latest_start_s(self) -> float:
        """Return until when an instance could start the request and deliver its first token in time.

        Where all have just been asked, that is an instance with its queue, and else an idle one: a request that waits
        for what cannot happen keeps those behind it waiting until they are as late.
        """
        compared, due_s = self._compared, self.request.indicators.due_s
        prompt_tokens = self.request.indicators.prompt_tokens
        if due_s == math.inf:
            return due_s
        if compared is not None and "predicted_queue_s" in compared.columns:
            ttft_s = compared["predicted_ttft_s"]
            least_s = float(np.fmin.reduce(ttft_s - compared["predicted_queue_s"], initial=math.inf))
            if least_s < math.inf:
                self.core.observe_prefill(least_s / max(1, prompt_tokens))
                if self._asks_all:
                    return due_s - float(np.fmin.reduce(ttft_s))
        return due_s - self.core.prefill_token_s * prompt_tokens

    def _too_late(self, now_s: float) -> Intention:
        """Go on with a request that becomes late before its turn has come."""
        if self.request.objective.when_late == SHED_LATE:
            return self._refuse_for_now(LATE, now_s)
        self._give_up_deadlines()
        return self._wait(now_s)

    def _give_up_deadlines(self) -> None:
        """Leave the deadlines of others alone from now on, as the request's own cannot be kept."""
        if self.request.objective.when_late == DEMOTE:
            self._demote()
        self._patient = True
        self._forget_targets()
        self._lane = lane_of(self.request.indicators.tpot_slo_s, patient=True)

    def _demote(self) -> None:
        """Make the request best effort without deadlines."""
        request = self.request
        request.objective = replace(request.objective, request_class=BEST_EFFORT, slo=Slo())
        self._forget_targets()

    def _forget_targets(self) -> None:
        """Compare instances from now on as for a request without targets."""
        request = self.request
        request.indicators = replace(request.indicators, due_s=math.inf, tpot_slo_s=math.inf)
        if self._compared is not None:  # what was derived from its targets is outdated
            self._compared.request = request.indicators
            for name in ("ttft_left_s", "tpot_slo_s", "tier_closed", "tier_ratio", "tier_fits"):
                self._compared.columns.pop(name, None)

    def _refuse_for_now(self, reason: str, now_s: float) -> Shed:
        """Refuse the request, and say when a new attempt may succeed."""
        return self._shed(OverloadedError(reason, retry_after_s=self._retry_after_s(now_s)), now_s)

    def _retry_after_s(self, now_s: float) -> float:
        """Return when a request like this one may be admitted: after those that wait, where it would be in time."""
        request, compared = self.request, self._compared
        is_best_effort, slo = request.objective.is_best_effort, request.objective.slo
        ttft_s = math.inf
        if compared is not None and len(compared) and "predicted_ttft_s" in compared.columns:
            ttft_s = float(np.fmin.reduce(compared["predicted_ttft_s"], initial=math.inf))
        if not math.isfinite(ttft_s):
            ttft_s = 0.0
        late_s = 0.0 if slo.ttft_s is None else ttft_s - slo.ttft_s
        queue = self.core.queue(request.model)
        rate = self.core.shares_of(request.model).tokens_per_s(now_s, real_time_only=not is_best_effort)
        queued_s = 0.0
        if queue is not None and rate > 0:
            tokens, all_left_s = queue.backlog(now_s, patient=is_best_effort)
            queued_s = min(tokens / rate, all_left_s - ttft_s)
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, queued_s, late_s))

    def _admit(self, best: int, now_s: float) -> Intention:
        """Have the chosen instance reserve the request, or forecast it first, or place it there as it is."""
        if self.request.dry_run:
            return self._placed(None, now_s)
        compared = self._compared
        assert compared is not None
        instance_id = compared.instance_id(best)
        instances = self.core.instances
        if instances.suspects and instance_id in instances.by_id:
            instances.by_id[instance_id].engine.allows(now_s)
        if self._num_failed >= self.core.rules.max_failed_reservations:
            return self._placed(None, now_s)
        asks = self.core.rules.forecast_always or self._forecasts_anyway
        if asks and not self.policy.needs_forecast and instance_id not in self._answers:
            return Ask(compared.only(np.array([best], np.intp)), (), False, *self._leg_at(best))
        return self._reserve(instance_id, compared.row(best))

    def _leg_at(self, _position: int) -> tuple[str, float]:
        """Return the leg of the instance at a position, and when it arrives there; -1 for one that is not compared."""
        return self._leg, self._in_s

    def _reserve(self, instance_id: str, row: int) -> Reserve:
        if_version = if_epoch = forecast = None
        chosen = self._chosen
        if isinstance(chosen, Candidate):
            if chosen.forecast is not None and self.num_conflicts < self.core.rules.max_conflicts:
                if_version, if_epoch = chosen.version + chosen.num_reserved_since, chosen.epoch
        elif self._forecasts is not None:
            answer, since = self._forecasts[chosen], (self._since or [])[chosen]
            forecast = self._predicted()[chosen] if since else answer.forecast
            if self.policy.keeps_deadlines:
                since = 0  # reservations made since may miss their deadlines: the instance has to look again
            if self.num_conflicts < self.core.rules.max_conflicts:
                if_version, if_epoch = answer.version + since, answer.epoch
        elif self._answers:
            forecast = self._answers[instance_id].forecast
        return Reserve(instance_id, row, if_version, if_epoch, forecast, self._leg, self._in_s)

    def _choose_fallback(self, candidate: Candidate, now_s: float) -> Intention:
        self._chosen = candidate
        if self.request.dry_run:
            return self._placed(None, now_s)
        status = self.core.instances.by_id.get(candidate.instance_id)
        if status is not None:
            status.engine.allows(now_s)
            if candidate.forecast is not None:
                candidate.num_reserved_since = status.versions.since(candidate.version, candidate.epoch)
        if candidate.status in SENT_UNRESERVED or self._num_failed >= self.core.rules.max_failed_reservations:
            return self._placed(None, now_s)
        return self._reserve(candidate.instance_id, self.core.instances.table.row_of.get(candidate.instance_id, NONE))

    def _reserve_with_forecast(self, answers: Mapping[str, Answer]) -> Reserve:
        """Reserve at an instance that was chosen without a forecast, and asked for one since."""
        assert isinstance(self._chosen, int)
        assert self._compared is not None
        instance_id, row = self._compared.instance_id(self._chosen), self._compared.row(self._chosen)
        self._answers = {instance_id: answers.get(instance_id, NO_ANSWER)}
        return self._reserve(instance_id, row)

    # The best of the compared.

    def _best(self) -> int:
        """Return the best position: those that admit the request first, then those that would ever finish it."""
        compared, scores = self._compared, self._scores
        if compared is None or scores is None:
            return NONE
        if self._order is None and not self._others and SESSION_HERE not in compared.columns:
            best = self.policy.best(compared, scores)
            if (self._admits is None or self._admits[best]) and not self._never_finishes(best):
                return best  # the first of the order, found faster
        return next(self._positions(), NONE)

    def _positions(self) -> Iterator[int]:
        """Yield positions that have not failed, best first."""
        order = self._order
        compared, scores = self._compared, self._scores
        if compared is None or scores is None:
            return
        if order is None:
            order = self._order = self._ordered(compared, scores)
        others = self._others
        for position in order:
            if not others or compared.instance_id(position) not in others:
                yield position

    def _ordered(self, compared: Candidates, scores: Column) -> list[int]:
        order = self.policy.order(compared, scores)
        if self._admits is not None:
            order = order[(~self._admits[order]).argsort(kind="stable")]
        e2e_s = compared.columns.get("predicted_e2e_s")
        if e2e_s is not None and (e2e_s == math.inf).any():
            order = order[(e2e_s[order] == math.inf).argsort(kind="stable")]
        ordered: list[int] = self.policy.with_session_first(compared, order, self._admits).tolist()
        return ordered

    def _never_finishes(self, position: int) -> bool:
        """Whether, by its forecast, the request would never finish there."""
        if not self.policy.needs_forecast:
            return False
        assert self._compared is not None
        e2e_s = self._compared.columns.get("predicted_e2e_s")
        return e2e_s is not None and e2e_s.item(position) == math.inf

    def _note_refusals(self, now_s: float) -> None:
        compared, admits = self._compared, self._admits
        assert compared is not None
        assert admits is not None
        if (
            self._may_wait
            and compared.known is self.core.instances.table.known  # otherwise the rows are of another list
            and not self._is_late(now_s)  # then the refusals say nothing of other requests
        ):
            rows = rows_of(compared)
            refusals = self.core.refusals(self._lane)
            refusals.note(self._refused(admits, rows), compared.known.reported[FINISHED][rows], now_s, rows)

    def _refused(self, admits: np.ndarray, _rows: Rows) -> np.ndarray:
        """Return which of the compared do not admit the request."""
        return ~admits

    # Instances that no policy compared.

    def _set_aside(self, instance_id: str, answer: Answer, now_s: float) -> None:
        """Record that an instance cannot be compared, and why."""
        status = self.core.instances.by_id.get(instance_id)
        if status is None:
            self._add_other(Candidate(instance_id=instance_id, status=answer.status, note=answer.note))
            return
        candidate = status.candidate(answer.status, answer.note, now_s)
        candidate.answered_s = answer.answered_s
        candidate.forecast, candidate.version, candidate.epoch = answer.forecast, answer.version, answer.epoch
        self._add_other(candidate)

    def _add_other(self, candidate: Candidate) -> None:
        if self._others is NO_CANDIDATES:
            self._others = {}
        self._others[candidate.instance_id] = candidate

    def _answer_of_other(self, candidate: Candidate, answer: Answer) -> None:
        candidate.status, candidate.forecast = answer.status, answer.forecast
        candidate.version, candidate.epoch, candidate.answered_s = answer.version, answer.epoch, answer.answered_s
        candidate.note = answer.note or candidate.note
        status = self.core.instances.by_id.get(candidate.instance_id)
        if status is not None:
            candidate.num_reserved_since = status.versions.since(answer.version, answer.epoch)
            candidate.indicators, candidate.num_unseen = status.indicators, status.num_unseen

    def _failed_at(self, status: CandidateStatus, note: str, now_s: float) -> Intention:
        """Choose again without the instance that has just failed to reserve."""
        note = f"when reserving: {note}"
        if isinstance(self._chosen, Candidate):
            self._chosen.status, self._chosen.note = status, note
        else:
            assert self._compared is not None
            candidate = self._candidate_at(self._chosen)
            candidate.status, candidate.note = status, note
            self._add_other(candidate)
            if self._forecasts:  # other reservations may have been made since
                self._rank_forecasts()
        return self._decide(now_s)

    def _fallbacks(self, now_s: float, *, with_left_out: bool = True) -> list[Candidate]:
        """Return the instances that no policy compared but that may work, the most likely one first."""
        by_id = self.core.instances.by_id
        candidates = dict(self._others)
        if self._shortlisted is not None and with_left_out:
            for name, note in self._shortlisted.left_out():
                if name in by_id and name not in candidates:
                    candidates[name] = by_id[name].candidate(CandidateStatus.NOT_SHORTLISTED, note, now_s)
        return sorted((one for one in candidates.values() if one.may_be_fallback), key=fallback_key)

    def _best_fallback(self, now_s: float) -> Candidate | None:
        fallbacks = self._fallbacks(now_s)
        if not fallbacks:
            return None
        if fallbacks[0].instance_id not in self._others:
            self._add_other(fallbacks[0])
        return fallbacks[0]

    def _none_left(self, now_s: float) -> Intention:
        """Go on where no instance is left."""
        return self._shed(self._refusal(), now_s)

    def _refusal(self) -> Exception:
        """Return why no instance can take the request: because of the request itself, or of the instances."""
        candidates = self.candidates()
        refused = [one for one in candidates if one.status is CandidateStatus.REFUSED]
        final = (CandidateStatus.REFUSED, CandidateStatus.EXCLUDED)
        if refused and all(one.status in final for one in candidates):
            return ValueError(f"request.{refused[0].note.removeprefix('when reserving: ')}")
        notes = "; ".join(f"{one.instance_id}: {one.note}" for one in candidates[:8])
        return NoInstanceError(f"no instance can take the request: {notes}")

    # Ends.

    def _wait(self, now_s: float) -> Wait | Shed:
        """Wait in the admission queue, the first of a lane until its next attempt, the others for their turn."""
        core, request = self.core, self.request
        if self._queue is None and (limit := core.limit_for(request)):
            return self._refuse_for_now(limit, now_s)
        if self._patient or not self.policy.keeps_deadlines:
            self._latest_s = math.inf
        elif self._compared is not None or self._latest_s == math.inf:
            self._latest_s = self._latest_start_s()
        refused = None if self._compared is None else rows_of(self._compared)
        self._reset()
        if self._queue is not None and refused is not None and not self._patient:
            self._pass_turn(refused)
        self._passing = None
        if self._queue is None:
            if self._number < 0:
                self._number = core.next_number()
            self._joined_s = now_s
            self._wait_until_s = math.inf
            self._queue = core.join(self, self._waiting(), self._leave_s())
        elif self._queue.lane_of(self._number) != self._lane:
            if request.objective.is_best_effort and self._queue.num_best_effort >= core.rules.max_held_best_effort:
                return self._refuse_for_now(CLASS_LIMIT, now_s)  # it was demoted
            core.move(self, self._waiting(), self._leave_s(), now_s)
        deadline_s = min(self._queue.deadline_s(self._number), max(now_s, self._latest_s))
        if self._wait_until_s == -math.inf:  # woken already
            return Wait(now_s)
        if self._queue.head(now_s, self._lane) == self._number:
            pause_s = retry_pause_s(now_s - request.arrived_s, core.random())
            self._wait_until_s = min(deadline_s, now_s + pause_s)
        else:
            self._wait_until_s = deadline_s
        return Wait(self._wait_until_s)

    def _pass_turn(self, refused: Rows) -> None:
        """Have the next shorter request of the lane tried on the instances that have just refused this one."""
        assert self._queue is not None
        number = self._queue.next_smaller(self._number)
        if number >= 0:
            self.core.waiting[number]._passing = refused  # noqa: SLF001 - another decision
            self.core.wake(number)

    def _waiting(self) -> WaitingRequest:
        """Return what the admission queue's order needs to know of the request."""
        request = self.request
        return WaitingRequest(
            number=self._number,
            lane=self._lane,
            joined_s=self._joined_s,
            due_s=request.indicators.due_s,
            priority=request.objective.priority,
            tenant=request.client_id,
            num_tokens=num_tokens_of(request),
            best_effort=request.objective.is_best_effort,
        )

    def _leave_s(self) -> float:
        """Return when the request leaves the admission queue at the latest: not before its first token is due."""
        request = self.request
        hold_s = self.policy.hold_s - request.waited_s
        if self.policy.keeps_deadlines:
            due_s = request.indicators.due_s
            if self._patient:
                hold_s = MAX_PATIENT_S
            elif due_s < math.inf:
                hold_s = max(hold_s, due_s - request.arrived_s)
        return request.arrived_s + min(hold_s, request.patience_s)

    def _leave_queue(self, now_s: float) -> None:
        queue, self._queue = self._queue, None
        if queue is not None:
            self.core.leave(self, self._number, now_s)

    def _placed(self, reserved_for_s: float | None, now_s: float) -> Intention:
        """End with a placement."""
        del now_s
        self._is_placed = True
        self.reserved_for_s = reserved_for_s
        request = self.request
        if self.policy.needs_prefix and request.prefix_hits is None and not request.dry_run:
            self.core.prefixes.sent(self._chosen_id(), request.blocks)
        if self.policy.needs_session and not request.dry_run:
            self.core.sessions.placed(request, self._chosen_id())
        if self.policy.holds and not request.dry_run:
            self.core.admitted(self, self._joined_s + self._held_s if self._queue is not None else request.arrived_s)
        if self._queue is not None:
            self._queue.count_served(self._number)
            self._leave_queue(self._joined_s + self._held_s)
        return Placed(self)

    def _chosen_id(self) -> str:
        chosen = self._chosen
        if isinstance(chosen, Candidate):
            return chosen.instance_id
        assert self._compared is not None
        return self._compared.instance_id(chosen)

    @property
    def placement(self) -> Placement:
        """Where the request goes, once it is placed."""
        assert self._is_placed
        if self._placement is None:
            chosen = self._chosen
            if isinstance(chosen, Candidate):
                basis = BASIS_OF[chosen.status] if chosen.is_compared else DecisionBasis.LAST_RESORT
            else:
                basis = BASIS_OF[self._status_of_compared()]
            self._placement = Placement(
                legs=self._legs(),
                policy=self.policy.text,
                basis=basis,
                decision=self,
                reserved_for_s=self.reserved_for_s,
                held_s=self._held_s,
                num_conflicts=self.num_conflicts,
                disaggregation=self.disaggregation,
            )
        return self._placement

    def _legs(self) -> tuple[Leg, ...]:
        return (Leg(self.request.leg, self._chosen_id(), self._chosen_forecast(), self.reserved_for_s),)

    def _chosen_forecast(self) -> Forecast | None:
        """Return the forecast of the chosen instance, if there is one."""
        chosen = self._chosen
        if isinstance(chosen, Candidate):
            return chosen.predicted if chosen.is_compared else None
        if self._forecasts is not None:
            return self._predicted()[chosen]
        answer = self._answers.get(self._chosen_id())
        return None if answer is None else answer.forecast

    def _shed(self, error: Exception, now_s: float) -> Shed:
        if self._queue is not None:
            self._leave_queue(now_s)
        return Shed(error, getattr(error, "retry_after_s", None))

    # The explanation.

    @property
    def is_admitted(self) -> bool:
        """Whether the chosen instance admits the request by the policy's condition."""
        if isinstance(self._chosen, Candidate):
            return self._chosen.admits
        return self._admits is None or bool(self._admits[self._chosen])

    @property
    def chosen(self) -> Candidate:
        """The chosen instance as the decision saw it."""
        return self._chosen if isinstance(self._chosen, Candidate) else self._candidate_at(self._chosen)

    def ranking(self) -> list[str]:
        """Return all instances that may serve the request, best first."""
        compared = self._compared
        positions = [] if compared is None else list(self._positions())
        able = [one for one in positions if not self._never_finishes(one)]
        names = [] if compared is None else [compared.instance_id(one) for one in able]
        fallback = [one.instance_id for one in self._fallbacks(0.0, with_left_out=not names)]
        never = [] if compared is None else [compared.instance_id(one) for one in positions[len(able) :]]
        return [*names, *fallback, *never]

    @property
    def num_skipped(self) -> int:
        """The number of instances that could not be compared."""
        return len(self.skipped())

    def skipped(self) -> list[Candidate]:
        """Return the instances that could not be compared, each with the reason."""
        return [
            one
            for one in self._others.values()
            if not one.is_compared and one.status is not CandidateStatus.NOT_SHORTLISTED
        ]

    def candidates(self) -> list[Candidate]:
        """Return all instances as the decision saw them, by id."""
        compared: list[Candidate] = []
        named: set[str] = set()
        for position in self._positions():
            candidate = self._candidate_at(position)
            if candidate.instance_id not in named:
                named.add(candidate.instance_id)
                compared.append(candidate)
        others = [one for one in self._others.values() if one.instance_id not in named]
        named.update(one.instance_id for one in others)
        shortlisted = self._shortlisted
        left_out = [] if shortlisted is None else list(shortlisted.left_out())
        by_id = self.core.instances.by_id
        rest = [
            by_id[name].candidate(
                CandidateStatus.NOT_SHORTLISTED, note, 0.0 if shortlisted is None else shortlisted.now_s
            )
            if name in by_id
            else Candidate(instance_id=name, status=CandidateStatus.NOT_SHORTLISTED, note=note)
            for name, note in left_out
            if name not in named
        ]
        return sorted([*compared, *others, *rest], key=lambda one: one.instance_id)

    def forecasts(self) -> list[tuple[str, Forecast]]:
        """Return the forecasts of all compared instances, corrected for the reservations made since."""
        compared = self._compared
        if compared is None or self._forecasts is None:
            return []
        pairs = zip(compared.instance_ids, self._predicted(), strict=True)
        return [(name, forecast) for name, forecast in pairs if forecast is not None and name not in self._others]

    def _status_of_compared(self) -> CandidateStatus:
        if self.policy.needs_forecast:
            return CandidateStatus.FORECAST
        return CandidateStatus.NOT_QUERIED if self.policy.is_blind else CandidateStatus.INDICATORS

    def _candidate_at(self, position: int) -> Candidate:
        compared = self._compared
        assert compared is not None
        name = compared.instance_id(position)
        candidate = Candidate(instance_id=name, status=self._status_of_compared())
        if name in self._indicators:
            candidate.indicators, age_s, reported_s, candidate.num_unseen = self._indicators[name]
            candidate.age_s = age_of(candidate.indicators, age_s, reported_s, self._indicators_s)
        if self._scores is not None:
            candidate.score = float(self._scores[position])
        if self._admits is not None:
            candidate.admits = bool(self._admits[position])
        if self._forecasts is not None:
            answer = self._forecasts[position]
            candidate.forecast, candidate.version, candidate.epoch = answer.forecast, answer.version, answer.epoch
            candidate.num_reserved_since = (self._since or [])[position]
            candidate.answered_s = answer.answered_s
        elif name in self._answers:
            candidate.forecast, candidate.answered_s = self._answers[name].forecast, self._answers[name].answered_s
        candidate.read = {read: float(column[position]) for read, column in self._reads.items()}
        candidate.age_s = candidate.read.pop("age_s", candidate.age_s)
        return candidate

    def _keep_indicators(self, names: Sequence[str], now_s: float) -> None:
        """Keep the last known indicators of some instances; each report replaces them by another object."""
        by_id = self.core.instances.by_id
        self._indicators_s = now_s
        self._indicators = {
            name: (one.indicators, one.age_s, one.reported_s, one.num_unseen)
            for name in names
            if (one := by_id.get(name)) is not None
        }

    def _copy_read_indicators(self, shortlisted: Candidates) -> None:
        """Copy the indicators that the policy read: the table is updated in place."""
        reads = {name: _own(shortlisted[name]) for name in self.policy.needs}
        shortlisted.add(reads)  # a tie-break may be read again
        if self._scores is not None:
            self._scores = _own(self._scores)
        age_s = shortlisted["age_s"]
        self._reads = {**reads, "age_s": np.where(age_s < math.inf, age_s, 0.0)} if reads else {}
        names = shortlisted.instance_ids
        if self._scores is not None and len(names) > MAX_EXPLAINED:
            best = self.policy.order(shortlisted, self._scores)[:MAX_EXPLAINED].tolist()
            names = tuple(names[position] for position in best)
        self._keep_indicators(names, shortlisted.now_s)


def rows_of(candidates: Candidates) -> Rows:
    """Return the rows of candidates among all instances."""
    return np.arange(len(candidates)) if candidates.rows is None else candidates.rows


def _own(column: Column) -> Column:
    """Return a column that is no view of the table."""
    return column if column.base is None else column.copy()


def _with_delays_of(before: Forecast | None, forecast: Forecast) -> Forecast:
    """Complete a forecast that came with a conflict, for which no delays were asked, by those of the one before."""
    if before is None or forecast.delay_sum_s is not None:
        return forecast
    return replace(
        forecast,
        delay_sum_s=before.delay_sum_s,
        delay_worst_s=before.delay_worst_s,
        others_preempted=before.others_preempted,
        others_missed=before.others_missed,
        gain_before=before.gain_before,
        gain_after=before.gain_after,
        least_slack_s=before.least_slack_s,
    )
