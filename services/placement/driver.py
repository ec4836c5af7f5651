"""Drives decisions on the wall clock: asks sidecars, reserves, waits; passes placements and outcomes to listeners."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predictor.request import DECODE, SERVE, adapter_number
from protos.block.v1 import common_pb2, predictor_pb2, scheduler_pb2
from scheduler.candidate import CandidateStatus
from scheduler.candidates import RequestIndicators
from scheduler.core import SchedulerCore
from scheduler.decision import Decision
from scheduler.instances import NOT_READY, PREFILL_ROLE, OverloadedError, UnknownModelError
from scheduler.intentions import Answer, Ask, AskLegs, Intention, Placed, Release, Reserve, Shed, Wait
from scheduler.objectives import Objective
from scheduler.placement import Placement, PlacementRequest
from scheduler.policy import Policy
from scheduler.prefix.prompt import NO_BLOCKS, PromptBlocks, blocks_of_text
from services.draining_requests import DrainingRequests
from services.http.engine_client import engine_client
from services.instances import Listed
from services.logs import log_event
from services.objectives import ObjectiveTable
from services.placement.decision_log import DecisionLog
from services.placement.decision_message import decision_message
from services.placement.instance_handle import InstanceHandle, ReserveError
from services.placement.instance_registry import InstanceRegistry
from services.placement.length_resolution import LengthResolver
from services.placement.listeners import COMPLETED, PlacementListener
from services.placement.metrics import SchedulerMetrics
from services.placement.provisioner_watch import ProvisionerWatch
from services.placement.replies import conflict_of, state_name
from services.placement.served_models import ServedModels
from services.placement.settings import MAX_RESERVATION_S, SchedulerSettings
from services.placement.sidecar_connection import ForecastCall, SidecarConnection
from services.placement.tail import Tail
from services.registered_instances import RegisteredInstances
from services.rpc.errors import UnknownNameError
from services.rpc.messages import LEG_NAMES, LEG_VALUES, forecast_message, require_name
from services.rpc.objectives import fill_from, objective_from, set_objective
from services.rpc.request_groups import num_responses_of, placeable_from, require_num_responses
from services.security.own_key import own_key

log = logging.getLogger(__name__)

OUTCOME_TIMES = ("ttft_s", "e2e_s", "tpot_s", "queue_s", "prefill_s", "hand_over_s")

RESERVE_RESULTS = {
    predictor_pb2.RESERVE_RESULT_RESERVED: "reserved",
    predictor_pb2.RESERVE_RESULT_EXTENDED: "extended",
    predictor_pb2.RESERVE_RESULT_CONFLICT: "conflict",
    predictor_pb2.RESERVE_RESULT_REFUSED: "refused",
}


class PlacementDriver:
    """Places requests, any number at once; it keeps nothing that a restart would lose."""

    def __init__(  # noqa: PLR0913 - its parts
        self,
        settings: SchedulerSettings,
        registry: InstanceRegistry,
        lengths: LengthResolver,
        metrics: SchedulerMetrics,
        listeners: Sequence[PlacementListener] = (),
        *,
        objectives: ObjectiveTable | None = None,
        registered: RegisteredInstances | None = None,
    ) -> None:
        """Place requests on the instances of a registry; listeners are called in their order."""
        self.registered = RegisteredInstances(Listed(())) if registered is None else registered
        self.requests = DrainingRequests(lambda reason: metrics.drain_stays.labels(reason).inc())
        self.settings = settings
        self.registry = registry
        self.log = DecisionLog(settings.max_explained)
        self.core = SchedulerCore(
            settings.policy,
            registry.directory,
            random=np.random.default_rng().random,
            rules=settings.rules(),
            seed=settings.seed,
        )
        self.core.prefixes.follow_events(registry.kv_events.streams)
        self.objectives = ObjectiveTable() if objectives is None else objectives
        self._lengths = lengths
        self._metrics = metrics
        provisioners = ProvisionerWatch(settings.provisioners, own_key(settings.part_key_file))
        self.models = ServedModels(registry, engine_client())
        self.tail = Tail(registry, self.log, metrics.registry, self._about, provisioners)
        self._listeners = (*listeners, self.log, self.tail)
        self._fan_outs = asyncio.Semaphore(settings.max_deciding)
        self._wakeups: dict[Decision, asyncio.Event] = {}
        self._watch_for(self.core.policy)

    # Policies.

    @property
    def policy(self) -> str:
        """The policy of requests that name none."""
        return self.core.policy.text

    def use_policy(self, text: str) -> None:
        """Decide by another policy from now on; decisions under way keep theirs."""
        self._watch_for(self.core.use_policy(text))

    def _watch_for(self, policy: Policy) -> None:
        """Have instances report by themselves, where a policy reads that, or how large their caches are."""
        if any(part.needs_indicators or part.needs_prefix for part in policy.parts):
            self.registry.watch()

    def _about(self) -> dict[str, Any]:
        """Return what the live page shows of the scheduler itself."""
        return {
            "scheduler": self.settings.scheduler_id,
            "policy": self.policy,
            "waiting": self.core.num_waiting,
            "waiting_by_tpot_slo": sorted(self.core.waiting_targets().items()),
        }

    # Placing.

    async def schedule(
        self, request: scheduler_pb2.ScheduleRequest, patience_s: float = math.inf
    ) -> common_pb2.Decision:
        """Decide where a request goes, and reserve there; the caller waits `patience_s` at most.

        ConnectionError where no instance can take the request now, OverloadedError where it is shed, ValueError where
        none ever will.
        """
        _, message = await self.place(
            request.request,
            prompt=request.prompt,
            policy=request.policy,
            excluded=frozenset(request.exclude_instance_ids),
            dry_run=request.dry_run,
            patience_s=patience_s,
            explain=request.explain,
        )
        return message

    async def place(  # noqa: PLR0913 - what a request may ask for
        self,
        request: common_pb2.Request,
        *,
        prompt: bytes = b"",
        policy: str = "",
        excluded: frozenset[str] = frozenset(),
        dry_run: bool = False,
        patience_s: float = math.inf,
        explain: bool = False,
        arrived_s: float | None = None,
    ) -> tuple[Placement, common_pb2.Decision]:
        """Decide where a request goes, and reserve there; return the placement and its wire form."""
        start_s = time.monotonic()
        arrived_s = start_s if arrived_s is None else arrived_s
        require_name("request.request_id", request.request_id)
        chosen_policy = self.core.policy_named(policy) if policy else self.core.policy
        self._watch_for(chosen_policy)
        try:
            await self.models.require(request.model)  # before any work is done for it
        except UnknownModelError as error:
            raise UnknownNameError(str(error)) from None
        if not request.adapter:
            request.adapter = self.models.adapter_of(request.model)
        name = request.objective
        if name:
            fill_from(request, self.objectives.named(name, "request.objective"))
        await self._complete(request, prompt, chosen_policy)
        objective = objective_from(request, name)
        decision = self.core.decision(
            PlacementRequest(
                request_id=request.request_id,
                model=request.model,
                indicators=_indicators(request, objective, arrived_s, self.settings.deadline_margin_s),
                blocks=_blocks(request, prompt)
                if any(part.needs_prefix for part in chosen_policy.parts)
                else NO_BLOCKS,
                excluded=excluded,
                dry_run=dry_run,
                arrived_s=arrived_s,
                waited_s=request.waited_s,
                patience_s=patience_s,
                leg=LEG_NAMES.get(request.leg, SERVE),
                objective=objective,
                client_id=request.client_id,
                session_id=request.session_id,
                undivided=request.leg == common_pb2.LEG_SERVE,
            ),
            policy,
        )
        handles: dict[str, InstanceHandle] = {}  # of the instances that it reserved at; one may be removed meanwhile
        placement = await self._drive(decision, request, handles)
        placement.decision_s = time.monotonic() - start_s - placement.held_s
        self._metrics.decision_s.labels(chosen_policy.name).observe(placement.decision_s)
        self._metrics.decisions.labels(chosen_policy.name, placement.basis.value).inc()
        if placement.disaggregation:
            self._metrics.disaggregations.labels(chosen_policy.name, placement.disaggregation).inc()
        if decision.request.objective != objective:
            self._metrics.demoted.inc()
        return placement, self._announce(placement, request, handles, asked=objective, explain=explain)

    async def _complete(self, request: common_pb2.Request, prompt: bytes, policy: Policy) -> None:
        """Find out what forecasts need to know of the request, and refuse an invalid one."""
        require_num_responses(request, self.settings.max_responses)
        if policy.length_quantiles > 1 and not request.length_quantiles:
            request.length_quantiles = policy.length_quantiles
        ask = self.settings.forecast_always or any(part.needs_forecast or part.needs_tag for part in policy.parts)
        await self._lengths.resolve(request, prompt, ask=ask)
        try:
            placeable_from(request)
        except ValueError as error:
            raise ValueError(f"request.{error}") from None

    def _announce(
        self,
        placement: Placement,
        request: common_pb2.Request,
        handles: Mapping[str, InstanceHandle],
        *,
        asked: Objective,
        explain: bool,
    ) -> common_pb2.Decision:
        """Convert a placement of a request, which `asked` for something, and pass it to the listeners."""

        def instance_of(instance_id: str) -> common_pb2.Instance | None:
            handle = handles.get(instance_id) or self.registry.find(instance_id)
            return None if handle is None else handle.message

        state_age_s = self._state_age_s(placement.instance_id)
        message = decision_message(
            placement,
            request,
            instance_of,
            asked=asked,
            scheduler_id=self.settings.scheduler_id,
            num_candidates=len(self.registry.directory.by_id),
            state_age_s=state_age_s,
            explain=explain or (self.settings.record_candidates and bool(self.settings.record)),
        )
        if not placement.decision.request.dry_run:
            self._metrics.placed(request.model, placement, state_age_s)
            for listener in self._listeners:
                listener.on_placement(request, placement, message)
        if log.isEnabledFor(logging.DEBUG):
            log_event(
                log, logging.DEBUG, "decided", request_id=message.request_id, instance=placement.instance_id,
                policy=placement.policy, basis=placement.basis.value, decision_ms=round(placement.decision_s * 1e3, 3),
                candidates=message.num_candidates, skipped=message.num_skipped, conflicts=placement.num_conflicts,
                reserved=placement.reserved_for_s is not None, why=message.why,
            )  # fmt: skip
        return message

    def _state_age_s(self, instance_id: str) -> float | None:
        """Return how old the last known state of an instance is; None where nothing is known of it."""
        status = self.registry.directory.by_id.get(instance_id)
        return status.age_at(time.monotonic()) if status is not None and status.indicators else None

    # The loop of one decision.

    async def _drive(
        self, decision: Decision, request: common_pb2.Request, handles: dict[str, InstanceHandle]
    ) -> Placement:
        """Carry out a decision's intentions until the request is placed."""
        if self.registry.directory.suspects:
            self.registry.probe_suspects()
        asked = sent = decision.request.objective
        intention = decision.start(time.monotonic())
        try:
            while not isinstance(intention, Placed):
                self._wake()
                if isinstance(intention, Shed):
                    raise self._shed(intention, asked)
                if decision.request.objective is not sent:  # the decision has demoted the request
                    sent = decision.request.objective
                    set_objective(request, sent)
                intention = await self._carried_out(intention, decision, request, handles)
        except BaseException:
            for name in decision.cancel(time.monotonic()):
                handles[name].forget(request.request_id)
            self._end_wait(decision, "left")
            raise
        finally:
            _set_leg(request, decision.request)
            request.waited_s = _waited_s(decision.request, time.monotonic())
            if sent is not asked:
                set_objective(request, asked)
            self._wake()
        placement = decision.placement
        self._end_wait(decision, "admitted" if decision.is_admitted else "not_admitted")
        for leg in () if decision.request.dry_run else placement.legs:
            handle = self.registry.find(leg.instance_id) if leg.reserved_for_s is None else None
            if handle is not None:
                handle.sent_without_reservation(0 if leg.kind == DECODE else request.prompt_tokens)
        return placement

    async def _carried_out(
        self,
        intention: Ask | AskLegs | Reserve | Release | Wait,
        decision: Decision,
        request: common_pb2.Request,
        handles: dict[str, InstanceHandle],
    ) -> Intention:
        """Carry out an intention; return the next one."""
        if isinstance(intention, Ask | AskLegs):
            answers = await self._ask(intention, decision, request)
            return decision.answers(answers, time.monotonic())
        if isinstance(intention, Reserve):
            return await self._reserve(intention, decision, request, handles)
        if isinstance(intention, Release):
            return await self._give_back(intention, decision, handles)
        await self._wait(decision, intention.until_s)
        return decision.tick(time.monotonic())

    def _shed(self, intention: Shed, asked: Objective) -> Exception:
        error = intention.error
        if isinstance(error, OverloadedError):
            self._metrics.shed.labels(error.reason, asked.request_class).inc()
            return error.advised(intention.retry_after_s)
        self._metrics.undecided.inc()
        return UnknownNameError(str(error)) if isinstance(error, UnknownModelError) else error

    # Waiting.

    async def _wait(self, decision: Decision, until_s: float) -> None:
        """Wait in the admission queue until a time, or until it is the decision's turn."""
        wakeup = self._wakeups.get(decision)
        if wakeup is None:
            wakeup = self._wakeups[decision] = asyncio.Event()
            self._metrics.held.inc()
        wakeup.clear()
        if decision.wait_until_s == -math.inf:
            return
        try:
            async with asyncio.timeout(None if until_s == math.inf else max(0.0, until_s - time.monotonic())):
                await wakeup.wait()
        except TimeoutError:
            pass

    def _wake(self) -> None:
        """Wake the decisions whose turn it is."""
        while self.core.ready:
            wakeup = self._wakeups.get(self.core.ready.popleft())
            if wakeup is not None:
                wakeup.set()

    def _end_wait(self, decision: Decision, end: str) -> None:
        if self._wakeups.pop(decision, None) is not None and decision.admission is not None:
            self._metrics.held.dec()
            self._metrics.holds.labels(end).inc()
            self._metrics.held_s.observe(time.monotonic() - decision.admission.joined_s)

    # Asking.

    async def _ask(
        self, intention: Ask | AskLegs, decision: Decision, request: common_pb2.Request
    ) -> dict[str, Answer]:
        """Ask instances for forecasts, with one message for each sidecar address and leg, and one deadline for all."""
        names = intention.instance_ids
        handles = {name: handle for name in names if (handle := self.registry.find(name)) is not None}
        answers = {
            name: Answer(CandidateStatus.DOWN, note="instance was removed from the list")
            for name in names
            if name not in handles
        }
        if not handles:
            return answers
        async with self._fan_outs:
            start_s = time.monotonic()
            self._set_waited(request, decision.request, start_s)
            calls = [call for ask in intention.asks for call in self._calls(ask, request, handles)]
            try:
                await asyncio.wait([call.reply for _, call in calls], timeout=self.settings.sidecar_deadline_s)
            except asyncio.CancelledError:
                for _, call in calls:
                    for name in call.names:
                        handles[name].ignore(call)
                raise
        answered_s = time.monotonic() - start_s
        self._metrics.fan_out_s.observe(answered_s)
        for _, call in calls:
            for name in call.names:
                answers[name] = handles[name].answer(call, request.request_id, answered_s)
        for connection, call in calls:
            connection.note(call)
        return answers

    @staticmethod
    def _calls(
        ask: Ask, request: common_pb2.Request, handles: Mapping[str, InstanceHandle]
    ) -> list[tuple[SidecarConnection, ForecastCall]]:
        by_connection: dict[SidecarConnection, list[str]] = {}
        for name in ask.instance_ids:
            if name in handles:
                by_connection.setdefault(handles[name].connection, []).append(name)
        _set_leg(request, ask)
        message = predictor_pb2.PredictRequest(requests=[request], with_delays=ask.with_delays).SerializeToString()
        return [(connection, connection.ask(message, names)) for connection, names in by_connection.items()]

    def _set_waited(self, request: common_pb2.Request, of: PlacementRequest, now_s: float) -> None:
        """Set from when the deadlines of a request count at sidecars: its arrival, earlier by the margin."""
        margin_s = 0.0 if of.objective.slo.ttft_s is None else self.settings.deadline_margin_s
        request.waited_s = _waited_s(of, now_s) + margin_s

    # Reserving.

    async def _reserve(
        self,
        intention: Reserve,
        decision: Decision,
        request: common_pb2.Request,
        handles: dict[str, InstanceHandle],
    ) -> Intention:
        """Reserve at an instance; return what the decision makes of the reply."""
        handle = self.registry.find(intention.instance_id)
        if handle is None:
            status, note = CandidateStatus.DOWN, "instance was removed from the list"
            return decision.reservation_failed(status, note, time.monotonic())
        handles[handle.name] = handle
        _set_leg(request, intention)
        self._set_waited(request, decision.request, time.monotonic())
        request.in_s = min(request.in_s, MAX_RESERVATION_S)  # sidecars accept no more
        message = predictor_pb2.ReserveRequest(
            request=request,
            ttl_s=self.settings.reservation_s,  # from the request's arrival
            holder=self.settings.scheduler_id,
            forecast=None if intention.forecast is None else forecast_message(intention.forecast),
            policy=decision.policy.text,
            instance_id=intention.instance_id,
            if_version=intention.if_version,
            if_epoch=intention.if_epoch,
        )
        try:
            response = await handle.reserve(message)
        except ReserveError as error:
            self._metrics.reserves.labels(error.status.value).inc()
            return decision.reservation_failed(error.status, error.note, time.monotonic())
        self._metrics.reserves.labels(RESERVE_RESULTS.get(response.result, "other")).inc()
        if response.result == predictor_pb2.RESERVE_RESULT_CONFLICT:
            return decision.conflict(conflict_of(response, request.request_id), time.monotonic())
        if response.result == predictor_pb2.RESERVE_RESULT_REFUSED:
            refusal = response.prediction.refusal
            state = state_name(response.state)
            if state in NOT_READY:
                status, note = NOT_READY[state][0], refusal.reason
            else:
                status, note = CandidateStatus.REFUSED, f"{refusal.field}: {refusal.reason}"
            return decision.reservation_failed(status, note, time.monotonic(), counts=False)
        return decision.reserved(response.expires_in_s, time.monotonic())

    async def _give_back(
        self, intention: Release, decision: Decision, handles: Mapping[str, InstanceHandle]
    ) -> Intention:
        """End a reservation; without a timely reply that goes on in the background."""
        name = intention.instance_id
        message = common_pb2.ReleaseRequest(request_id=decision.request.request_id, instance_id=name)
        releasing = handles[name].start(handles[name].release(message))
        await asyncio.wait([releasing], timeout=self.settings.sidecar_deadline_s)
        confirmed = releasing.done() and releasing.result().released
        return decision.released(time.monotonic(), confirmed=confirmed)

    # Outcomes.

    async def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """Pass the end of a request on to its instance's sidecar, and its outcome to the listeners."""
        require_name("request_id", request.request_id)
        require_name("instance_id", request.instance_id)
        if request.HasField("outcome"):
            require_outcome(request.outcome)
        if request.HasField("outcome"):
            outcome = request.outcome
            outcome.request_id, outcome.instance_id = request.request_id, request.instance_id
            self._learn(outcome)
        handle = self.registry.find(request.instance_id)
        is_prefill = handle is not None and handle.instance.role == PREFILL_ROLE
        goes_on = is_prefill and not self.log.is_answered_by(request.instance_id, request.request_id)
        if not (goes_on or request.HasField("outcome")):
            for listener in self._listeners:
                listener.on_release(request.request_id, request.instance_id)
        if handle is None:  # it was removed meanwhile
            self._metrics.releases.labels("unknown_instance").inc()
            return common_pb2.ReleaseResponse()
        return await self._release(handle, request)

    def ended(self, outcome: common_pb2.Outcome) -> None:
        """Learn from the outcome of a request that was streamed here, and release it in the background."""
        self._learn(outcome)
        handle = self.registry.find(outcome.instance_id)
        if handle is None:  # it was removed meanwhile
            self._metrics.releases.labels("unknown_instance").inc()
            return
        request = common_pb2.ReleaseRequest(
            request_id=outcome.request_id, instance_id=outcome.instance_id, outcome=outcome
        )
        handle.start(self._release(handle, request))

    def sent_elsewhere(self, request: common_pb2.Request, instance_id: str) -> None:
        """Count a request at an instance that serves it without a reservation."""
        handle = self.registry.find(instance_id)
        if handle is not None:
            handle.sent_without_reservation(request.prompt_tokens)

    def _learn(self, outcome: common_pb2.Outcome) -> None:
        directory = self.registry.directory
        if outcome.finish_reason == common_pb2.FINISH_REASON_FAILED:
            directory.engine_failed(outcome.instance_id, time.monotonic())
        elif outcome.finish_reason in COMPLETED:
            directory.engine_succeeded(outcome.instance_id)
        if outcome.instance_id == outcome.prefill_instance_id:  # only the prefill leg has ended
            return
        if outcome.HasField("hand_over_s"):
            self.core.observe_hand_over(outcome.hand_over_s)
        for listener in self._listeners:
            listener.on_outcome(outcome)

    async def _release(self, handle: InstanceHandle, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        response = await handle.release(request)
        self._metrics.releases.labels("yes" if response.released else "no").inc()
        return response


def require_outcome(outcome: common_pb2.Outcome) -> None:
    """Refuse times that are invalid."""
    for name in OUTCOME_TIMES:
        value = getattr(outcome, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"outcome.{name}: must be a time from 0 on, not {value}")


def _set_leg(request: common_pb2.Request, of: Ask | Reserve | PlacementRequest) -> None:
    """Write into a request which leg an instance is asked about, or reserves, or which one is to be placed."""
    request.leg, request.in_s = LEG_VALUES[of.leg], getattr(of, "in_s", 0.0)
    request.ClearField("held_s")
    if isinstance(of, Reserve) and of.held_s is not None:
        request.held_s = of.held_s


def _waited_s(of: PlacementRequest, now_s: float) -> float:
    """Return how long a request has been in the system."""
    return of.waited_s + now_s - of.arrived_s


def _indicators(
    request: common_pb2.Request, objective: Objective, arrived_s: float, margin_s: float
) -> RequestIndicators:
    tokens = request.tag.median_tokens if request.HasField("tag") else float(request.output_tokens or "nan")
    slo = objective.slo
    return RequestIndicators(
        prompt_tokens=request.prompt_tokens,
        tag_tokens=tokens * num_responses_of(request),
        due_s=math.inf if slo.ttft_s is None else arrived_s - request.waited_s + slo.ttft_s - margin_s,
        tpot_slo_s=math.inf if slo.tpot_s is None else slo.tpot_s,
        adapter=adapter_number(request.adapter),
    )


def _blocks(request: common_pb2.Request, prompt: bytes) -> PromptBlocks:
    """Name a prompt's blocks: by tokens where the caller did so, else by text."""
    if request.prefix_hashes and request.prefix_block_tokens:
        names = tuple(request.prefix_hashes)
        return PromptBlocks(names=names, block_tokens=request.prefix_block_tokens, by_tokens=True)
    return blocks_of_text(prompt, request.prompt_tokens, request.adapter)
