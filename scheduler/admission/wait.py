"""How one request waits in the admission queue: its turn, its lateness, and what follows where no instance admits it.

`AdmissionWait` has what is known of the wait; the decision that holds it carries out the steps that it returns.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from predictor.request import BEST_EFFORT, SERVE, Slo
from scheduler.admission.late_work import DEFERRED, LateWork
from scheduler.admission.lateness import latest_start_s
from scheduler.admission.order import WaitingRequest
from scheduler.admission.queue import AdmissionQueue, lane_of, retry_pause_s
from scheduler.candidates import Candidates, Rows
from scheduler.comparison import HITS, Comparison, rows_of
from scheduler.indicators import INDEX_OF
from scheduler.instances import CLASS_LIMIT, LATE, QUEUE_FULL, TIMEOUT
from scheduler.objectives import DEMOTE, SERVE_LATE, SHED
from scheduler.placement import PlacementRequest, num_tokens_of
from scheduler.policy import Policy
from scheduler.tier_formulas import STRICTEST_S

if TYPE_CHECKING:
    from scheduler.core import SchedulerCore
    from scheduler.decision import Decision

FINISHED = INDEX_OF["num_finished_total"]
# Maximum wait for an instance where no other request would miss a deadline: of best effort, and of late requests under
# overload; then of late requests without overload. For late requests it starts at their own deadline.
MAX_BACKGROUND_WAIT_S, MAX_LATE_S = 60.0, 10.0
CACHED_SHARE = 0.2  # of a prompt: an instance that has more of it may admit a request although it refused the last one


class NextStep(Enum):
    """The next step of a request that waits, or that no instance admits."""

    ATTEMPT = "compare the instances as they are now"
    SCORE_AGAIN = "compare the same forecasts, without targets"
    WAIT = "wait in the admission queue"
    REFUSE = "refuse it"  # for the reason `refused_because`
    PLACE = "place it on the best instance without admission"


class AdmissionWait:
    """The wait of one request, by a policy that holds requests; it starts before the request joins the queue.

    A background request is best effort, late already, or deferred: it must not make others miss a deadline.
    """

    queue: AdmissionQueue | None = None  # while it waits there, or tries between two waits
    joined_s = 0.0
    held_s = 0.0
    wait_until_s = math.inf
    may_wait = True
    refused_because = QUEUE_FULL
    retry_on: Rows | None = None  # instances that it may try before its turn: they have just refused a longer request
    _asks_all = True  # also the instances that have just refused
    deadlines_dropped = ""  # why the request dropped its deadlines
    _work_s = 0.0  # of an instance, that the request takes for each unit of its weight
    _latest_s = math.inf  # while it waits: when it may become too late to attain its deadlines

    def __init__(self, core: SchedulerCore, request: PlacementRequest, policy: Policy) -> None:
        """Prepare the wait of a request."""
        self._core = core
        self._request = request
        self._policy = policy
        self.number = request.number
        self._due_s = request.indicators.due_s  # also when the deadlines are dropped
        self.is_background = request.objective.is_best_effort
        self._lane = lane_of(request.indicators.tpot_slo_s, background=self.is_background)

    # Whether it is deferred.

    def may_be_deferred(self, now_s: float) -> bool:
        """Whether the request is a new one with deadlines, which is served late rather than refused or demoted.

        The work of requests is counted only under overload: otherwise no work is late.
        """
        request = self._request
        is_new = request.leg == SERVE and not request.excluded
        has_deadlines = self._due_s < math.inf and request.objective.when_late == SERVE_LATE
        defers = self._policy.long > 0 and self._core.defers and self._late_work.is_overload(now_s)
        return defers and is_new and has_deadlines and not self.is_background

    def defer_if_long(self, known: Candidates, now_s: float) -> None:
        """Drop the deadlines of a request that takes long, where work is late."""
        least_s = float(np.fmin.reduce(known["work_s"], initial=math.inf))
        if math.isfinite(least_s):  # otherwise the length of its response is not known
            self._work_s = least_s / self._request.objective.weight
            if self._late_work.arrived(self._lane, self._work_s, now_s, long=self._policy.long):
                self._drop_deadlines(DEFERRED)

    @property
    def _late_work(self) -> LateWork:
        return self._core.late_work_of(self._request.model)

    # Its turn.

    @property
    def is_behind_others(self) -> bool:
        """Whether other requests wait before a new one."""
        queue = self._core.queue(self._request.model)
        return queue is not None and queue.has_lane(self._lane)

    def next_step(self, now_s: float) -> NextStep:
        """Return whether the request is tried now: it is its turn, or its time is up."""
        assert self.queue is not None
        self.wait_until_s = math.inf
        if self.queue.must_leave(self.number, now_s):
            self.may_wait = False
            self.refused_because = TIMEOUT if self.queue.deadline_s(self.number) <= now_s else QUEUE_FULL
        elif self.retry_on is None and (head := self.queue.head(now_s, self._lane)) != self.number:
            self._core.wake(head)
            if now_s < self._latest_s:
                return NextStep.WAIT
            if not self.queue.may_overtake(self.number, head):
                return self._too_late(now_s)
        self.held_s = now_s - self.joined_s
        return NextStep.ATTEMPT

    def wake(self) -> bool:
        """Make a wait end now; False where it does so already."""
        is_new = self.wait_until_s != -math.inf
        self.wait_until_s = -math.inf
        return is_new

    # Which instances are asked.

    def worth_asking(self, known: Candidates, now_s: float) -> Candidates | None:
        """Return the instances that may admit the request now; None where it waits without asking any."""
        self._asks_all = True
        if self.may_wait and self.is_background and self._waits_behind_urgent(known):
            return None
        if not (self.may_wait and len(known) and now_s < self._latest_s):  # one that may be late asks all
            return known
        if not self.is_background:
            known = self._policy.eligible(known)
        worth = self._without_refusals(known, now_s)
        self._asks_all = len(worth) == len(known)
        return worth if len(worth) else None

    def _without_refusals(self, known: Candidates, now_s: float) -> Candidates:
        """Leave out the instances that have just refused, where nothing has finished since, and no prefix is cached."""
        if self.retry_on is not None:
            return known.only(np.flatnonzero(np.isin(rows_of(known), self.retry_on)), "was not asked before")
        refusals = self._core.refusals(self._lane)
        worth = refusals.worth_asking(known.known.reported[FINISHED][rows_of(known)], now_s, known.rows)
        if HITS in known.columns:
            worth |= known[HITS] > CACHED_SHARE * known.prompt_tokens
        return known if worth.all() else known.only(np.flatnonzero(worth), "admitted no request recently")

    def _waits_behind_urgent(self, known: Candidates) -> bool:
        """Whether it waits behind others that have a deadline to miss and are not stricter than any instance."""
        queue = self._core.queue(self._request.model)
        if queue is None or not self._policy.keeps_deadlines or (self._is_best_effort and self._is_below_share):
            return False
        targets_s = known["least_tpot_slo_s"]
        return queue.has_urgent(float(targets_s[targets_s < math.inf].max(initial=STRICTEST_S)), self.number)

    def note_refusals(self, comparison: Comparison, now_s: float) -> None:
        """Record which instances do not admit the request, so that the next one of its lane asks others."""
        compared, admits = comparison.compared, comparison.admits
        assert compared is not None
        assert admits is not None
        if (
            self.may_wait
            and compared.known is self._core.instances.table.known  # otherwise the rows are of another list
            and not self._is_late(compared, now_s)  # then the refusals say nothing of other requests
        ):
            rows = rows_of(compared)
            refusals = self._core.refusals(self._lane)
            refusals.note(comparison.refused(admits, rows), compared.known.reported[FINISHED][rows], now_s, rows)

    # Where no instance admits it.

    def step_of_refused(self, comparison: Comparison, now_s: float) -> NextStep:
        """Return the next step of a request that no instance admits now."""
        compared, objective = comparison.compared, self._request.objective
        assert compared is not None
        if self._is_late(compared, now_s):
            return self._step_of_late(comparison, now_s)
        if self._is_best_effort and self._policy.keeps_deadlines:
            if self._is_below_share:
                return NextStep.PLACE
            return NextStep.WAIT if self.may_wait else NextStep.REFUSE
        if self.may_wait:
            return NextStep.WAIT
        if self._policy.keeps_deadlines and objective.when_late == SHED:
            return NextStep.REFUSE
        if self._policy.keeps_deadlines and objective.when_late == DEMOTE:
            self._demote()
            comparison.forget_targets(self._request.indicators)
        return NextStep.PLACE

    def _step_of_late(self, comparison: Comparison, now_s: float) -> NextStep:
        """Return the next step of a request whose deadlines cannot be kept any more."""
        if self._request.objective.when_late == SHED:
            self.refused_because = LATE
            return NextStep.REFUSE
        self._became_late(now_s)
        comparison.is_background = True
        comparison.forget_targets(self._request.indicators)
        assert comparison.compared is not None
        waits = self.may_wait and self._waits_behind_urgent(comparison.compared)
        return NextStep.WAIT if waits else NextStep.SCORE_AGAIN

    def _too_late(self, now_s: float) -> NextStep:
        """Return the next step of a request that becomes late before its turn."""
        if self._request.objective.when_late == SHED:
            self.refused_because = LATE
            return NextStep.REFUSE
        self._became_late(now_s)
        return NextStep.WAIT

    def _is_late(self, compared: Candidates, now_s: float) -> bool:
        """Whether the request's deadlines cannot be kept any more, as far as `latest_start_s` knows."""
        return self._policy.keeps_deadlines and not self.is_background and now_s >= self._latest_start_s(compared)

    def _latest_start_s(self, compared: Candidates | None) -> float:
        return latest_start_s(self._core, self._request, compared, asked_all=self._asks_all)

    def _became_late(self, now_s: float) -> None:
        """Drop deadlines that cannot be kept any more."""
        prompt_s = self._core.least_prefill_token_s * self._request.indicators.prompt_tokens
        if self._work_s > 0 and self._due_s - self._request.arrived_s > prompt_s:  # an idle instance could keep them
            self._late_work.became_late(self._lane, self._work_s, now_s)
        self._drop_deadlines(LATE)

    def _drop_deadlines(self, why: str) -> None:
        """Drop the deadlines of the request; from now on it must not make others miss theirs."""
        self.deadlines_dropped = why
        if self._request.objective.when_late == DEMOTE:
            self._demote()
        self.is_background = True
        self._forget_targets()
        self._lane = lane_of(self._request.indicators.tpot_slo_s, background=True)

    def _demote(self) -> None:
        """Make the request best effort without deadlines."""
        self._request.objective = replace(self._request.objective, request_class=BEST_EFFORT, slo=Slo())
        self._forget_targets()

    def _forget_targets(self) -> None:
        late = int(not self._is_best_effort)
        self._request.indicators = replace(self._request.indicators, due_s=math.inf, tpot_slo_s=math.inf, late=late)

    @property
    def _is_best_effort(self) -> bool:
        return self._request.objective.is_best_effort

    @property
    def _is_below_share(self) -> bool:
        """Whether best effort has got less than its share of the admitted tokens."""
        return self._core.shares_of(self._request.model).is_below(self._core.rules.best_effort_share)

    # Joining and leaving the queue.

    def limit(self) -> str:
        """Return the limit that keeps the request from joining the queue; empty where there is none."""
        return "" if self.queue is not None else self._core.limit_for(self._request)

    def note_latest_start(self, compared: Candidates | None) -> None:
        """Store when the request may become too late, by the instances on which it was compared if there are any."""
        if self.is_background or not self._policy.keeps_deadlines:
            self._latest_s = math.inf
        elif compared is not None or self._latest_s == math.inf:
            self._latest_s = self._latest_start_s(compared)

    def wait(self, decision: Decision, refused: Candidates | None, now_s: float) -> str:
        """Wait until the next attempt or the request's turn; return the limit that it exceeds, empty if none.

        `refused` are the instances that have just refused it.
        """
        core, request, queue = self._core, self._request, self.queue
        if not self.is_background and self._due_s < math.inf:
            self._late_work.waits(now_s)
        if queue is not None and refused is not None and not self.is_background:
            self._try_next_shorter(queue, rows_of(refused))
        self.retry_on = None
        if queue is None:
            if self.number < 0:
                self.number = core.next_number()
            self.joined_s = now_s
            self.wait_until_s = math.inf
            queue = self.queue = core.join(decision, self._waiting_request(), self._leave_s(now_s))
        elif queue.lane_of(self.number) != self._lane:
            if self._is_best_effort and queue.num_best_effort >= core.rules.max_held_best_effort:
                return CLASS_LIMIT  # it was demoted
            core.move(request, self._waiting_request(), self._leave_s(now_s), now_s)
        if self.wait_until_s == -math.inf:  # woken already
            return ""
        self.wait_until_s = min(queue.deadline_s(self.number), max(now_s, self._latest_s))
        if queue.head(now_s, self._lane) == self.number:
            pause_s = retry_pause_s(now_s - request.arrived_s, core.random())
            self.wait_until_s = min(self.wait_until_s, now_s + pause_s)
        return ""

    def _try_next_shorter(self, queue: AdmissionQueue, refused: Rows) -> None:
        """Let the next shorter request of the lane try the instances that have just refused this one."""
        number = queue.next_shorter(self.number)
        if number >= 0:
            other = self._core.waiting[number].admission
            assert other is not None
            other.retry_on = refused
            self._core.wake(number)

    def placed(self) -> None:
        """Count the request as admitted, and leave the queue."""
        request, queue = self._request, self.queue
        admitted_s = request.arrived_s if queue is None else self.joined_s + self.held_s
        self._core.admitted(request, admitted_s)
        if (waiting := self._core.queue(request.model)) is not None:
            waiting.count_served(request.client_id, num_tokens_of(request))
        if queue is not None:
            self.leave(admitted_s)

    def leave(self, now_s: float) -> None:
        """Leave the queue, if the request is in it."""
        if self.queue is not None:
            self.queue = None
            self._core.leave(self._request, self.number, now_s)

    def _waiting_request(self) -> WaitingRequest:
        """Return what the admission queue's order needs to know of the request."""
        request = self._request
        return WaitingRequest(
            number=self.number,
            lane=self._lane,
            joined_s=self.joined_s,
            due_s=request.indicators.due_s,
            priority=request.objective.priority,
            tenant=request.client_id,
            num_tokens=num_tokens_of(request),
            best_effort=request.objective.is_best_effort,
        )

    def _leave_s(self, now_s: float) -> float:
        """Return when the request leaves the admission queue at the latest: not before its first token is due."""
        request = self._request
        hold_s = self._policy.hold_s - request.waited_s
        if self._policy.keeps_deadlines:
            until_due_s = max(0.0, self._due_s - request.arrived_s)
            if self._is_best_effort:
                hold_s = MAX_BACKGROUND_WAIT_S
            elif self.is_background:
                hold_s = until_due_s + (MAX_BACKGROUND_WAIT_S if self._late_work.is_overload(now_s) else MAX_LATE_S)
            elif until_due_s < math.inf:
                hold_s = max(hold_s, until_due_s)
        return request.arrived_s + min(hold_s, request.max_wait_s)
