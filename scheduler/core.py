"""The state that one scheduler's decisions share: instances, policies, admission queues, prefixes, sessions."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from predictor.request import SERVE
from predictor.suggestions import require_choice
from scheduler.admission.late_work import LateWork
from scheduler.admission.order import (
    ARRIVAL_TURN,
    DEADLINE_TURN,
    SHORTEST_TURN,
    HeadOf,
    WaitingRequest,
    turn_named,
)
from scheduler.admission.queue import (
    ASK_AGAIN_S,
    BACKGROUND_ASK_AGAIN_S,
    AdmissionQueue,
    Order,
    RecentRefusals,
    is_background,
)
from scheduler.admission.shares import ClassShares
from scheduler.candidates import Candidates
from scheduler.decision import Decision
from scheduler.disaggregation import SERVE_WHOLE, WITHOUT_POOL, DisaggregatedDecision
from scheduler.instances import CLASS_LIMIT, QUEUE_FULL, TENANT_LIMIT, InstanceDirectory
from scheduler.objectives import SHED
from scheduler.placement import PlacementRequest, num_tokens_of
from scheduler.policy import Policy, policy_from
from scheduler.prefix.prompt import PromptPrefixes
from scheduler.sessions import SessionMemory

MAX_MODELS = 1024  # whose admitted tokens and late work are counted; callers may name any adapter
# Only with these turns long requests are deferred: the other turns decide by themselves who goes first.
BY_TIME_OR_LENGTH = (ARRIVAL_TURN, DEADLINE_TURN, SHORTEST_TURN)
MAX_POLICIES = 64  # that are kept for requests that name one
MAX_HAND_OVER_S = 1.0  # a longer one is taken for a fault and ignored
PREFILL_DECAY = 0.001  # by which the least time per prompt token grows with each forecast
HAND_OVER_WEIGHT = 0.05  # of each new value in the average

Counts = TypeVar("Counts")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRules:
    """How decisions deal with conflicts, with many waiting requests, and with forecasts that no policy needs."""

    max_conflicts: int = 10  # of one request with other schedulers; then it reserves unconditionally
    max_failed_reservations: int = 2  # of one request; then it is sent without a reservation
    max_held: int = 1000  # requests of one model in the admission queue
    max_held_tokens: float = math.inf  # of these requests: prompts and predicted responses
    max_held_of_tenant: int = sys.maxsize
    max_held_best_effort: int = sys.maxsize
    max_held_real_time: int = sys.maxsize
    admission_turn: str = ARRIVAL_TURN  # the order in which requests of a lane of the admission queue get their turn
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # of the turn `fair`; 1 without one
    best_effort_share: float = 0.05  # of the admitted tokens: best effort gets it also where that makes others late
    forecast_always: bool = False  # ask the chosen instance for a forecast also where the policy needs none
    without_pool: str = SERVE_WHOLE  # what happens to a request that needs a pool which is empty or down
    hand_over_s: float = 0.003  # from the end of a prefill leg to the arrival of the decode leg, until it is measured
    explains: bool = True  # keep what an explanation needs

    def __post_init__(self) -> None:
        """Refuse invalid values; the error names the field."""
        require_choice("without_pool", self.without_pool, WITHOUT_POOL)
        turn_named(self.admission_turn)
        for name in ("max_held", "max_held_of_tenant", "max_held_best_effort", "max_held_real_time"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must be a number of requests from 0 on, not {getattr(self, name)}")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"tenant_weights: {tenant!r}: must be a number above 0, not {weight}")
        if not self.max_held_tokens >= 0:
            raise ValueError(f"max_held_tokens: must be a number of tokens from 0 on, not {self.max_held_tokens}")
        if not 0 <= self.best_effort_share <= 1:
            raise ValueError(f"best_effort_share: must be a share from 0 to 1, not {self.best_effort_share}")


class SchedulerCore:
    """Makes decisions, any number of them at once. It has no clock, no I/O and no randomness of its own.

    `ready` holds the waiting decisions that are to be ticked now: a driver takes them after every event.
    """

    def __init__(  # noqa: PLR0913 - the parts that decisions share
        self,
        policy: Policy | str,
        instances: InstanceDirectory,
        *,
        random: Callable[[], float],
        rules: DecisionRules | None = None,
        order: Order | None = None,
        prefixes: PromptPrefixes | None = None,
        seed: int | None = None,
    ) -> None:
        """Decide over instances by a policy; `random` gives numbers from 0 to 1 for pauses between attempts."""
        self.instances = instances
        self.rules = rules or DecisionRules()
        self.random = random
        self.prefixes = PromptPrefixes(instances.table) if prefixes is None else prefixes
        self.sessions = SessionMemory()
        self.hand_over_s = self.rules.hand_over_s
        self.ready: deque[Decision] = deque()
        self.waiting: dict[int, Decision] = {}
        self._order = order
        self._seed = seed
        self._numbers = count()
        self._queues: dict[str, AdmissionQueue] = {}
        self._refusals: dict[int, RecentRefusals] = {}  # by lane
        self._refusals_of: tuple[str, ...] = ()
        self._shares: dict[str, ClassShares] = {}  # by model
        self._late_work: dict[str, LateWork] = {}  # by model
        self.defers = self.rules.admission_turn in BY_TIME_OR_LENGTH  # long requests, under overload
        self.least_prefill_token_s = 0.0  # from the first step to the first token, over the length of the prompt
        self._policies: dict[str, Policy] = {}
        self.policy = self.policy_named(policy) if isinstance(policy, str) else policy

    # Policies.

    def use_policy(self, text: str) -> Policy:
        """Decide by another policy from now on, where requests name none; decisions under way keep theirs."""
        self.policy = self.policy_named(text)
        return self.policy

    def policy_named(self, text: str) -> Policy:
        """Return the policy that a text describes; it keeps its state between requests."""
        policy = self._policies.get(text)
        if policy is None:
            policy = policy_from(text, self._seed)
            if len(self._policies) >= MAX_POLICIES:
                del self._policies[next(name for name, one in self._policies.items() if one is not self.policy)]
            self._policies[text] = policy
        return policy

    # Decisions.

    def decision(self, request: PlacementRequest, policy: str = "") -> Decision:
        """Return a new decision for one request, not yet started."""
        chosen = self.policy_named(policy) if policy else self.policy
        if self.instances.has_roles and request.leg == SERVE:
            return DisaggregatedDecision(self, request, chosen)
        return Decision(self, request, chosen)

    def observe_hand_over(self, seconds: float) -> None:
        """Learn how long it takes from the end of a prefill leg to the arrival of the decode leg."""
        if 0 <= seconds <= MAX_HAND_OVER_S:
            self.hand_over_s += HAND_OVER_WEIGHT * (seconds - self.hand_over_s)

    def observe_prefill(self, token_s: float) -> None:
        """Learn the least time per prompt token from forecasts; an old minimum grows with each forecast."""
        known = self.least_prefill_token_s
        self.least_prefill_token_s = min(token_s, known * (1 + PREFILL_DECAY)) if known else token_s

    # Prompts and sessions.

    def look_up(self, request: PlacementRequest, policy: Policy, known: Candidates) -> None:
        """Add what is known of a request's prompt, and of its session, where a policy reads that."""
        if policy.needs_prefix:
            if request.prefix_hits is None:
                self.prefixes.look_up(request.blocks, known)
            else:
                hits, rows = request.prefix_hits, known.rows
                known.columns["prefix_hit_tokens"] = hits if rows is None else hits[rows]
        if policy.needs_session:
            self.sessions.look_up(request, known)

    def remember(self, request: PlacementRequest, policy: Policy, instance_id: str) -> None:
        """Remember where the prompt and the session of a request went."""
        if policy.needs_prefix and request.prefix_hits is None:
            self.prefixes.sent(instance_id, request.blocks)
        if policy.needs_session:
            self.sessions.placed(request, instance_id)

    # The admission queue.

    def next_number(self) -> int:
        """Return a number that grows with arrival."""
        return next(self._numbers)

    def queue(self, model: str) -> AdmissionQueue | None:
        """Return the admission queue of a model, if any request waits for it."""
        return self._queues.get(model)

    def join(self, decision: Decision, waiting: WaitingRequest, deadline_s: float) -> AdmissionQueue:
        """Add a decision to its model's admission queue; if that is too long, wake the request that has to leave."""
        model = decision.request.model
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = AdmissionQueue(
                self.rules.max_held, self._order, self._new_turn(), self.rules.max_held_tokens
            )
        queue.join(waiting.number, deadline_s, waiting)
        self.waiting[waiting.number] = decision
        if queue.is_full:
            self.wake(queue.next_to_leave)
        return queue

    def _new_turn(self) -> HeadOf:
        return turn_named(self.rules.admission_turn, self.rules.tenant_weights)

    def limit_for(self, request: PlacementRequest) -> str:
        """Return the limit that forbids a request to wait, as a reason to shed it; empty where there is none."""
        queue = self._queues.get(request.model) or AdmissionQueue()
        is_full = len(queue) >= self.rules.max_held or queue.num_tokens >= self.rules.max_held_tokens
        if is_full and request.objective.when_late == SHED:
            return QUEUE_FULL
        if request.client_id and queue.num_of_tenant(request.client_id) >= self.rules.max_held_of_tenant:
            return TENANT_LIMIT
        num_real_time = len(queue) - queue.num_best_effort
        if request.objective.is_best_effort and queue.num_best_effort >= self.rules.max_held_best_effort:
            return CLASS_LIMIT
        if not request.objective.is_best_effort and num_real_time >= self.rules.max_held_real_time:
            return CLASS_LIMIT
        return ""

    def leave(self, request: PlacementRequest, number: int, now_s: float) -> None:
        """Remove a request from its queue, and wake the first request of every lane."""
        queue = self._queues[request.model]
        queue.leave(number)
        del self.waiting[number]
        if queue:
            if queue.is_full:
                self.wake(queue.next_to_leave)
            for head in queue.heads(now_s):
                self.wake(head)
        else:
            del self._queues[request.model]  # callers may name any model

    def move(self, request: PlacementRequest, waiting: WaitingRequest, deadline_s: float, now_s: float) -> None:
        """Move a request to another lane of its queue, and wake the first requests of the lanes, except itself."""
        queue = self._queues[request.model]
        queue.change(deadline_s, waiting)
        for head in queue.heads(now_s):
            if head != waiting.number:
                self.wake(head)

    def wake(self, number: int) -> None:
        """Have a waiting decision ticked now."""
        decision = self.waiting[number]
        if decision.wake():
            self.ready.append(decision)

    @property
    def num_waiting(self) -> int:
        """The number of requests in admission queues."""
        return len(self.waiting)

    def waiting_targets(self) -> dict[float, int]:
        """Count the waiting requests, without best effort, by their targets for the time per token."""
        found: Counter[float] = Counter()
        for decision in self.waiting.values():
            request = decision.request
            if not request.objective.is_best_effort and request.indicators.tpot_slo_s < math.inf:
                found[request.indicators.tpot_slo_s] += 1
        return dict(found)

    def refusals(self, lane: int = 0) -> RecentRefusals:
        """Return which instances admitted no request of a lane recently; a new list of instances clears this."""
        ids = self.instances.table.known.instance_ids
        if ids is not self._refusals_of:
            self._refusals, self._refusals_of = {}, ids
        if lane not in self._refusals:
            ask_again_s = BACKGROUND_ASK_AGAIN_S if is_background(lane) else ASK_AGAIN_S
            self._refusals[lane] = RecentRefusals(len(ids), ask_again_s)
        return self._refusals[lane]

    def admitted(self, request: PlacementRequest, now_s: float) -> None:
        """Count the tokens of a request that got its placement, for the share of its class."""
        tokens = num_tokens_of(request)
        self.shares_of(request.model).count(tokens, now_s, best_effort=request.objective.is_best_effort)

    def shares_of(self, model: str) -> ClassShares:
        """Return the counts of admitted tokens of a model, by class."""
        return _of_model(self._shares, model, ClassShares)

    def late_work_of(self, model: str) -> LateWork:
        """Return how much of the work of a model's requests is late."""
        return _of_model(self._late_work, model, LateWork)


def _of_model(known: dict[str, Counts], model: str, make: Callable[[], Counts]) -> Counts:
    """Return what is counted for a model; of too many models the one that is known longest is forgotten."""
    counts = known.get(model)
    if counts is None:
        if len(known) >= MAX_MODELS:
            del known[next(iter(known))]
        counts = known[model] = make()
    return counts
