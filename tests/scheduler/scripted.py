"""Scripted sidecars, and a plain driver of decisions over them on a virtual clock: the reference for all other drivers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest import mock

import numpy as np

from predictor.forecast import Forecast
from predictor.request import DECODE, PREFILL, SERVE
from scheduler.candidate import CandidateStatus
from scheduler.candidates import RequestIndicators
from scheduler.circuit import CircuitState
from scheduler.core import DecisionRules, SchedulerCore
from scheduler.decision import Decision
from scheduler.disaggregation import SERVE_WHOLE, DisaggregatedDecision
from scheduler.explanation import why
from scheduler.instances import InstanceDirectory, InstanceStatus
from scheduler.intentions import Answer, Ask, AskLegs, Intention, Placed, Release, Reserve, Shed, Wait
from scheduler.objectives import NO_OBJECTIVE, Objective
from scheduler.placement import PlacementRequest
from scheduler.prefill_leg import PrefillDecision

EPOCH = 7
TTFT_S = 0.1
PROMPT_TOKENS = 10
FIRST_S = 100.0  # the time at which every script begins
NOTES = {
    CandidateStatus.LATE: "no reply within 50 ms",
    CandidateStatus.DOWN: "cannot be reached",
    CandidateStatus.INVALID: "its reply is malformed",
    CandidateStatus.REFUSED: "prompt_tokens: too many",
    CandidateStatus.STOPPED: "its engine is down",
}

HAVE_VERSIONS = (CandidateStatus.FORECAST, CandidateStatus.REFUSED, CandidateStatus.STOPPED)  # replies, not failures


def forecast_of(
    e2e_s: float,
    *,
    queue_s: float = 0.0,
    delays: bool = False,
    ttft_s: float = TTFT_S,
    attained: bool = True,
    others_missed: int = 0,
) -> Forecast:
    """A forecast with delays in proportion to its time, where they are asked for."""
    return Forecast(
        request_id="",
        ttft_s=queue_s + ttft_s,
        e2e_s=queue_s + e2e_s,
        tpot_s=0.01,
        queue_s=queue_s,
        output_tokens=100,
        num_preemptions=0,
        prefix_hit_tokens=0,
        delay_sum_s=2.0 * queue_s if delays else None,
        delay_worst_s=queue_s if delays else None,
        others_preempted=0 if delays else None,
        attained=float(attained),
        others_missed=others_missed if delays else None,
        gain_before=10.0 if delays else None,
        gain_after=10.0 + attained - others_missed if delays else None,
        least_slack_s=2.0 - queue_s if delays else None,
    )


@dataclass(frozen=True, kw_only=True)
class Reply:
    """How an instance replies to one call about one request; a failed one has a status other than FORECAST."""

    after_s: float = 0.0
    status: CandidateStatus = CandidateStatus.FORECAST
    others_first: int = 0  # reservations of other schedulers that come before this one


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request of a script, and how each instance replies to forecast calls and to reservations for it, in order."""

    after_s: float
    forecasts: Mapping[str, Sequence[Reply]] = field(default_factory=dict)  # the last one is repeated
    reservations: Mapping[str, Sequence[Reply]] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    dry_run: bool = False
    objective: Objective = NO_OBJECTIVE
    client_id: str = ""
    session_id: str = ""
    max_wait_s: float = math.inf


@dataclass(frozen=True, kw_only=True)
class ScriptedInstance:
    """An instance of a script, and after how long requests finish there."""

    name: str
    e2e_s: float = 2.0
    num_running: int = 1
    draining: bool = False
    engine_failed: bool = False
    finishes_s: Sequence[float] = ()
    role: str = "both"
    prefill_s: float = 0.5  # of a prefill leg
    transfer_s: float = 0.02  # of a decode leg, of which the prefill takes none of its time
    keeps_released: bool = False  # its releases fail
    num_without_misses: int = 1 << 30  # so many reservations delay no other request beyond its deadlines


@dataclass(frozen=True, kw_only=True)
class Script:
    """All that decisions depend on, other than their rules."""

    policy: str
    instances: Sequence[ScriptedInstance]
    arrivals: Sequence[Arrival]
    per_reservation_s: float = 0.3
    deadline_s: float = 0.05
    max_conflicts: int = 10
    max_held: int = 1000
    forecast_always: bool = False
    without_pool: str = SERVE_WHOLE
    seed: int = 3
    limits: Mapping[str, Any] = field(default_factory=dict)  # of the admission queue, and its order

    @property
    def rules(self) -> DecisionRules:
        """The rules of the core."""
        return DecisionRules(
            max_conflicts=self.max_conflicts,
            max_held=self.max_held,
            forecast_always=self.forecast_always,
            without_pool=self.without_pool,
            **self.limits,
        )


class Sidecar:
    """The sidecar of a scripted instance: it counts reservations as real ones do."""

    def __init__(self, instance: ScriptedInstance, script: Script) -> None:
        """Start without a reservation."""
        self.instance, self.script, self.name = instance, script, instance.name
        self.version = self.num_held = self.num_finished = 0
        self.reserved: dict[int, str] = {}  # the legs of requests that are reserved here
        self._asked: dict[tuple[str, int], int] = {}

    def next_reply(self, kind: str, request: int) -> Reply:
        """Look up how it replies to the next call about a request."""
        replies = getattr(self.script.arrivals[request], kind).get(self.name) or [Reply()]
        number = self._asked.get((kind, request), 0)
        self._asked[kind, request] = number + 1
        return replies[min(number, len(replies) - 1)]

    def forecast(
        self, *, delays: bool = False, leg: str = SERVE, in_s: float = 0.0, left_s: float = math.inf
    ) -> Forecast:
        """Forecast a leg of a request behind all that are reserved; its first token is due in `left_s`."""
        forecast = self._forecast(delays=delays, leg=leg, in_s=in_s)
        missed = max(0, self.num_held + 1 - self.instance.num_without_misses)
        is_late = leg != PREFILL and forecast.ttft_s > left_s
        if not is_late and not missed:
            return forecast
        return replace(
            forecast,
            attained=float(not is_late),
            others_missed=missed if delays else None,
            gain_after=10.0 + (not is_late) - missed if delays else None,
        )

    def _forecast(self, *, delays: bool, leg: str, in_s: float) -> Forecast:
        one, queue_s = self.instance, self.script.per_reservation_s * self.num_held
        if leg == PREFILL:
            return forecast_of(one.prefill_s, queue_s=queue_s, delays=delays, ttft_s=one.prefill_s)
        if leg == DECODE:
            start_s = max(queue_s, in_s)
            rest_s = max(0.0, one.e2e_s - one.prefill_s) + one.transfer_s
            forecast = forecast_of(rest_s, queue_s=start_s, delays=delays, ttft_s=min(rest_s, 2.0 * one.transfer_s))
            return replace(forecast, fetched_s=start_s + one.transfer_s)
        return forecast_of(one.e2e_s, queue_s=queue_s, delays=delays)

    def answer(
        self, reply: Reply, *, delays: bool, leg: str = SERVE, in_s: float = 0.0, left_s: float = math.inf
    ) -> Answer:
        """Answer a forecast call now."""
        if reply.status is CandidateStatus.FORECAST:
            forecast = self.forecast(delays=delays, leg=leg, in_s=in_s, left_s=left_s)
            return Answer(reply.status, forecast, self.version, EPOCH)
        version, epoch = (self.version, EPOCH) if reply.status in HAVE_VERSIONS else (0, 0)
        return Answer(reply.status, None, version, epoch, NOTES[reply.status])

    def reserve(self, reply: Reply, if_version: int | None, request: int = -1, leg: str = SERVE) -> str:
        """Reserve now, unless others came first, or the script refuses; return the result."""
        self.version += reply.others_first
        self.num_held += reply.others_first
        if reply.status is not CandidateStatus.FORECAST:
            return "refused"
        if if_version is not None and if_version != self.version:
            return "conflict"
        self.version += 1
        self.num_held += 1
        self.reserved[request] = leg
        return "reserved"

    def release(self, request: int) -> bool:
        """End a reservation; return whether there was one, and it did end."""
        if self.instance.keeps_released or self.reserved.pop(request, None) is None:
            return False
        self.num_held = max(0, self.num_held - 1)
        return True

    def finish(self) -> None:
        """Finish a request."""
        self.num_held = max(0, self.num_held - 1)
        self.num_finished += 1

    def indicators(self) -> dict[str, float]:
        """Report how busy it is."""
        return {
            "num_running": float(self.instance.num_running),
            "num_waiting": 0.0,
            "num_reserved": float(self.num_held),
            "num_total_blocks": 100.0,
            "num_free_blocks": 100.0 - 7.0 * self.instance.num_running - self.num_held,
            "num_reserved_blocks": float(self.num_held),
            "num_waiting_blocks": 0.0,
            "queued_prefill_tokens": float(PROMPT_TOKENS * self.num_held),
            "context_tokens": 100.0 * self.instance.num_running,
            "requests_per_minute": float(self.num_held + self.num_finished),
            "num_finished_total": float(self.num_finished),
            "decode_step_s": 0.01 * (self.instance.num_running + self.num_held),
            "queued_prefill_s": 0.002 * self.num_held,
            "least_tpot_slo_s": 0.05 if self.num_held else math.inf,
            "efficient_step_s": 0.04 if self.num_held > 1 else math.inf,
            "step_overhead_s": 0.0012 if self.num_held > 1 else math.inf,
            "prefill_token_s": 1e-4,
        }


# What was decided.


@dataclass
class Record:
    """What decisions did, in the order in which it happened, and when."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    decisions: dict[str, Decision] = field(default_factory=dict)
    last: dict[str, str] = field(default_factory=dict)
    depth: int = 0  # of events that are being handled

    def take(self, decision: Decision, intention: Intention, now_s: float | None) -> None:
        """Record an intention; a decision that goes on waiting is recorded once."""
        name = decision.request.request_id or f"r{decision.request.number}"
        kind = type(intention).__name__
        if kind == "Wait" and self.last.get(name) == "Wait":
            return
        self.last[name] = kind
        self.decisions[name] = decision
        self.steps.append((name, kind, *_details(intention)))
        if now_s is not None:
            self.times_s.append(now_s)


def _details(intention: Intention) -> tuple[Any, ...]:
    if isinstance(intention, Ask | AskLegs):
        return tuple((ask.instance_ids, ask.with_delays, ask.leg, round(ask.in_s, 6)) for ask in intention.asks)
    if isinstance(intention, Reserve):
        times = times_of(intention.forecast), round(intention.in_s, 6), rounded(intention.held_s)
        return intention.instance_id, intention.leg, intention.if_version, intention.if_epoch, times
    if isinstance(intention, Release):
        return (intention.instance_id,)
    if isinstance(intention, Shed):
        return type(intention.error).__name__, str(intention.error), rounded(intention.retry_after_s)
    if isinstance(intention, Placed):
        return explained(intention.decision)
    return ()


def held_s_of(decision: Decision) -> float:
    """How long a decision waited in the admission queue, as far as it has tried again since."""
    return 0.0 if decision.admission is None else decision.admission.held_s


def rounded(value: float | None) -> float:
    """A number that may be unknown, but for rounding."""
    return -1.0 if value is None else round(value, 6)


def times_of(forecast: Forecast | None) -> tuple[float, ...] | None:
    """The numbers of a forecast; those that cross the wire are equal but for rounding."""
    if forecast is None:
        return None
    values = (forecast.queue_s, forecast.ttft_s, forecast.e2e_s, forecast.delay_sum_s, forecast.fetched_s)
    return tuple(map(rounded, values))


def explained(decision: Decision) -> tuple[Any, ...]:
    """A placement with its explanation."""
    placement = decision.placement
    return (
        placement.instance_id,
        placement.basis,
        placement.reserved_for_s,
        placement.num_conflicts,
        placement.disaggregation,
        tuple(
            (leg.kind, leg.instance_id, rounded(leg.reserved_for_s), times_of(leg.forecast)) for leg in placement.legs
        ),
        tuple(placement.next_best),
        why(placement, len(decision.core.instances.by_id)),
        tuple(
            (
                one.instance_id,
                one.status,
                None if one.score is None else "nan" if math.isnan(one.score) else round(one.score, 6),
                one.admits,
                one.engine_failed,
                one.note,
                times_of(one.predicted),
                {name: round(value, 6) for name, value in one.read.items() if value == value},  # noqa: PLR0124 - NaN
                dict(one.indicators),
                one.num_unseen,
                round(one.age_s, 4),
            )
            for one in decision.explanation.candidates()
        ),
    )


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Record the intentions of all decisions, whichever driver carries them out."""
    with ExitStack() as stack:
        for kind in (Decision, DisaggregatedDecision):
            recorded = {name: _recorded(kind, name, record) for name in EVENTS if name in vars(kind)}
            stack.enter_context(mock.patch.multiple(kind, **recorded))
        yield


EVENTS = ("start", "answers", "answers_in_columns", "conflict", "reservation_failed", "tick", "reserved", "released")


def _recorded(kind: type[Decision], name: str, record: Record) -> Callable[..., Intention]:
    original = getattr(kind, name)

    def event(decision: Decision, *arguments: Any, **options: Any) -> Intention:
        is_inner = isinstance(decision, PrefillDecision) or record.depth  # part of another decision's event
        record.depth += 1
        try:
            intention: Intention = original(decision, *arguments, **options)
        finally:
            record.depth -= 1
        times = [value for value in arguments if isinstance(value, float)] if name != "reserved" else []
        if not is_inner:
            record.take(decision, intention, times[-1] if times else None)
        return intention

    return event


# The reference.


def core_of(script: Script, sidecars: Mapping[str, Sidecar]) -> SchedulerCore:
    """A core that knows the instances of a script."""
    directory = InstanceDirectory()
    never_open = {"failures_to_open": 1 << 30}
    directory.update(
        InstanceStatus(
            instance_id=one.instance.name,
            role=one.instance.role,
            is_draining=one.instance.draining,
            connection=CircuitState(**never_open),
            sidecar=CircuitState(**never_open),
            engine=CircuitState(**never_open),
        )
        for one in sidecars.values()
    )
    fail_engines(script, directory)
    random = np.random.default_rng(script.seed).random
    return SchedulerCore(script.policy, directory, random=random, rules=script.rules, seed=script.seed)


def fail_engines(script: Script, directory: InstanceDirectory) -> None:
    """Have the engines fail that the script says so of, for longer than it lasts."""
    for one in script.instances:
        if one.engine_failed:
            engine = directory.by_id[one.name].engine
            engine.num_failures, engine.retry_at_s = engine.failures_to_open, math.inf
            directory.suspect(one.name)


class ReferenceDriver:
    """Drives decisions on a virtual clock; every wait is a generator's `yield` of the time at which it goes on."""

    def __init__(self, script: Script, *, fresh: bool = False) -> None:
        """Prepare a script; with `fresh` decisions see, as in the simulator, what instances are and can do now."""
        self.script = script
        self.sidecars = {one.name: Sidecar(one, script) for one in script.instances}
        self.core = core_of(script, self.sidecars)
        self.now_s = FIRST_S
        self._fresh = fresh
        self._watches = any(part.needs_indicators or part.needs_prefix for part in self.core.policy.parts)
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._processes: dict[Decision, Callable[[], object]] = {}

    def run(self) -> None:
        """Run the script to its end."""
        for sidecar in self.sidecars.values():
            self._report(sidecar)
            for after_s in sidecar.instance.finishes_s:
                self.at(FIRST_S + after_s, lambda sidecar=sidecar: (sidecar.finish(), self._report(sidecar)))
        for number, arrival in enumerate(self.script.arrivals):
            self.at(FIRST_S + arrival.after_s, lambda number=number: self._arrive(number))
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            while self.core.ready:
                self._processes[self.core.ready.popleft()]()

    def at(self, time_s: float, event: Callable[[], object]) -> None:
        """Have something happen at a time."""
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _arrive(self, number: int) -> None:
        arrival = self.script.arrivals[number]
        slo = arrival.objective.slo
        decision = self.core.decision(
            PlacementRequest(
                request_id=f"r{number}",
                number=number if self._fresh else -1,
                indicators=RequestIndicators(
                    prompt_tokens=PROMPT_TOKENS,
                    tag_tokens=9.0,
                    due_s=math.inf if slo.ttft_s is None else self.now_s + slo.ttft_s,
                    tpot_slo_s=math.inf if slo.tpot_s is None else slo.tpot_s,
                ),
                prefix_hits=np.zeros(len(self.sidecars)) if self._fresh else None,
                any_model=self._fresh,
                rows=self._able(arrival) if self._fresh else None,
                excluded=frozenset() if self._fresh else arrival.excluded,
                dry_run=arrival.dry_run,
                arrived_s=self.now_s,
                objective=arrival.objective,
                client_id=arrival.client_id,
                session_id=arrival.session_id,
                max_wait_s=arrival.max_wait_s,
            )
        )
        process = self._process(decision, number)
        turn = 0

        def go_on(expected: int | None = None) -> None:
            nonlocal turn
            if expected not in (None, turn):
                return  # it was woken before
            turn += 1
            for until_s in process:
                if until_s < math.inf:
                    self.at(max(self.now_s, until_s), lambda expected=turn: go_on(expected))
                break

        self._processes[decision] = go_on
        go_on()

    def _able(self, arrival: Arrival) -> np.ndarray | None:
        """Return the rows of the instances that a request may go to; None for all."""
        row_of = self.core.instances.table.row_of
        rows = sorted(row_of[name] for name in self.sidecars if name not in arrival.excluded)
        return None if len(rows) == len(row_of) else np.array(rows, np.intp)

    def _process(self, decision: Decision, number: int) -> Generator[float, None, None]:
        self._refresh()
        intention = decision.start(self.now_s)
        while not isinstance(intention, Placed | Shed):
            if isinstance(intention, Ask | AskLegs):
                left_s = decision.request.indicators.due_s - self.now_s
                answers = yield from self._ask(intention, number, left_s)
                intention = decision.answers(answers, self.now_s)
            elif isinstance(intention, Reserve):
                intention = yield from self._reserve(intention, decision, number)
            elif isinstance(intention, Release):
                confirmed = self.sidecars[intention.instance_id].release(number)
                if not confirmed:
                    self.core.instances.suspect(intention.instance_id)
                intention = decision.released(self.now_s, confirmed=confirmed)
            elif isinstance(intention, Wait):
                yield intention.until_s
                self._refresh()
                intention = decision.tick(self.now_s)
        if isinstance(intention, Placed) and not decision.request.dry_run:
            for leg in decision.placement.legs:
                if leg.reserved_for_s is None:
                    self.core.instances.by_id[leg.instance_id].num_unseen += 1
                    tokens = 0.0 if leg.kind == DECODE else PROMPT_TOKENS
                    self.core.instances.table.sent(leg.instance_id, self.now_s, prefill_tokens=tokens)

    def _ask(self, intention: Ask | AskLegs, number: int, left_s: float) -> Generator[float, None, dict[str, Answer]]:
        start_s, answers = self.now_s, {}
        replies = {name: self.sidecars[name].next_reply("forecasts", number) for name in intention.instance_ids}
        ask_of = {name: ask for ask in intention.asks for name in ask.instance_ids}
        for name, reply in sorted(replies.items(), key=lambda one: one[1].after_s):
            if reply.status is not CandidateStatus.LATE:
                if reply.after_s:
                    yield start_s + reply.after_s
                ask = ask_of[name]
                answers[name] = self.sidecars[name].answer(
                    reply, delays=ask.with_delays, leg=ask.leg, in_s=ask.in_s, left_s=left_s
                )
        if len(answers) < len(replies):
            yield start_s + self.script.deadline_s
        for name, reply in replies.items():
            late = reply.status is CandidateStatus.LATE
            answers[name] = self._heard(name, Answer(reply.status, note=NOTES[reply.status]) if late else answers[name])
        return answers

    def _heard(self, name: str, answer: Answer) -> Answer:
        """Note the count of reservations that an answer carries, and have failing instances looked at."""
        if answer.epoch:
            self.core.instances.by_id[name].versions.report(answer.version, answer.epoch)
        else:
            self.core.instances.suspect(name)
        return answer

    def _reserve(self, intention: Reserve, decision: Decision, number: int) -> Generator[float, None, Intention]:
        name, sidecar = intention.instance_id, self.sidecars[intention.instance_id]
        status, table = self.core.instances.by_id[name], self.core.instances.table
        reply = sidecar.next_reply("reservations", number)
        start_s = self.now_s
        tokens = 0.0 if intention.leg == DECODE else PROMPT_TOKENS
        counted = table.in_flight(name, start_s, prefill_tokens=tokens, blocks=1)
        with status.versions.claimed(intention.if_version), nullcontext() if self._fresh else counted:
            if reply.status is CandidateStatus.LATE:
                yield start_s + self.script.deadline_s
            elif reply.after_s:
                yield start_s + reply.after_s
            result = sidecar.reserve(reply, intention.if_version, number, intention.leg)
            if reply.status in HAVE_VERSIONS:
                status.versions.report(sidecar.version, EPOCH)
            else:
                self.core.instances.suspect(name)
            if reply.status is CandidateStatus.STOPPED:
                self.core.instances.engine_failed(name, self.now_s)
        if result == "reserved":
            return decision.reserved(10.0, self.now_s)
        if result == "conflict":
            left_s = decision.request.indicators.due_s - start_s
            forecast = sidecar.forecast(leg=intention.leg, in_s=intention.in_s, left_s=left_s)
            return decision.conflict(Answer(CandidateStatus.FORECAST, forecast, sidecar.version, EPOCH), self.now_s)
        counts = reply.status is not CandidateStatus.STOPPED
        return decision.reservation_failed(reply.status, NOTES[reply.status], self.now_s, counts=counts)

    # What instances report by themselves.

    def _report(self, sidecar: Sidecar) -> None:
        if self._fresh or not (self._watches or sidecar.instance.draining):
            return  # instances that drain report whatever the policy reads
        status = self.core.instances.by_id[sidecar.name]
        status.indicators, status.reported_s, status.num_unseen = sidecar.indicators(), self.now_s, 0
        self.core.instances.table.replace(sidecar.name, status.indicators, self.now_s)
        status.versions.report(sidecar.version, EPOCH)

    def _refresh(self) -> None:
        if self._fresh:
            for name, sidecar in self.sidecars.items():
                self.core.instances.table.replace(name, sidecar.indicators(), self.now_s)


def reference(script: Script, *, fresh: bool = False) -> Record:
    """What the decisions of a script are."""
    record = Record()
    with recording(record):
        ReferenceDriver(script, fresh=fresh).run()
    return record
