"""Places requests: fills in what they lack, runs their decisions, and passes placements to listeners."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from protos.block.v1 import common_pb2, scheduler_pb2
from scheduler.core import SchedulerCore
from scheduler.instances import UnknownModelError
from scheduler.objectives import SERVE_LATE, Objective
from scheduler.placement import Placement
from scheduler.policy import Policy
from services.http.engine_client import engine_client
from services.instances.draining_requests import DrainingRequests
from services.instances.registered_instances import RegisteredInstances
from services.instances.sources import Listed
from services.logs import log_event
from services.objectives import ObjectiveTable
from services.placement.decision_log import DecisionLog
from services.placement.decision_loop import DecisionLoop
from services.placement.decision_message import decision_message
from services.placement.instance_handle import InstanceHandle
from services.placement.instance_registry import InstanceRegistry
from services.placement.length_resolution import LengthResolver
from services.placement.listeners import PlacementListener
from services.placement.metrics import SchedulerMetrics
from services.placement.outcome_handling import OutcomeHandler
from services.placement.provisioner_watch import ProvisionerWatch
from services.placement.request_conversion import placement_request_of
from services.placement.served_models import ServedModels
from services.placement.settings import SchedulerSettings
from services.placement.tail import Tail
from services.rpc.errors import UnknownNameError
from services.rpc.messages import require_name
from services.rpc.objectives import fill_from, objective_from
from services.rpc.request_groups import placeable_from, require_num_responses
from services.security.own_key import own_key

log = logging.getLogger(__name__)


class PlacementDriver:
    """Places requests, any number at the same time; a restart loses only those that wait for admission."""

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
        self.outcomes = OutcomeHandler(registry, self.core, self.log, self._listeners, metrics)
        self._decisions = DecisionLoop(self.core, registry, settings, metrics)
        self._watch_for(self.core.policy)
        self._warned_of_when_late = False
        for one in self.objectives.objectives.values():
            self._warn_if_ignored(one, self.core.policy)

    # Policies.

    @property
    def policy(self) -> str:
        """The policy of requests that name none."""
        return self.core.policy.text

    def use_policy(self, text: str) -> None:
        """Decide by another policy from now on; decisions under way keep theirs."""
        self._watch_for(self.core.use_policy(text))

    def _watch_for(self, policy: Policy) -> None:
        """Follow the reports of sidecars where a policy reads indicators or cached prefixes."""
        if any(part.needs_indicators or part.needs_prefix for part in policy.parts):
            self.registry.watch()

    def _warn_if_ignored(self, objective: Objective, policy: Policy) -> None:
        """Log once that the policy serves late requests whatever their objective says of that."""
        if objective.when_late == SERVE_LATE or policy.keeps_deadlines or self._warned_of_when_late:
            return
        self._warned_of_when_late = True
        log_event(
            log, logging.WARNING, "policy ignores when_late", policy=policy.text, when_late=objective.when_late,
            objective=objective.name, read_by="slo, polyserve",
        )  # fmt: skip

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
        self, request: scheduler_pb2.ScheduleRequest, max_wait_s: float = math.inf
    ) -> common_pb2.Decision:
        """Decide where a request goes, and reserve there; the caller waits `max_wait_s` at most.

        ConnectionError where no instance can take the request now, OverloadedError where it is shed, ValueError where
        none ever will.
        """
        _, message = await self.place(
            request.request,
            prompt=request.prompt,
            policy=request.policy,
            excluded=frozenset(request.exclude_instance_ids),
            dry_run=request.dry_run,
            max_wait_s=max_wait_s,
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
        max_wait_s: float = math.inf,
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
        self._warn_if_ignored(objective, chosen_policy)
        decision = self.core.decision(
            placement_request_of(
                request,
                objective,
                prompt=prompt,
                needs_prefix=any(part.needs_prefix for part in chosen_policy.parts),
                excluded=excluded,
                dry_run=dry_run,
                arrived_s=arrived_s,
                max_wait_s=max_wait_s,
                margin_s=self.settings.deadline_margin_s,
            ),
            policy,
        )
        handles: dict[str, InstanceHandle] = {}  # of the instances that it reserved at; one may be removed meanwhile
        placement = await self._decisions.drive(decision, request, handles)
        placement.decision_s = time.monotonic() - start_s - placement.held_s
        self._count(placement, chosen_policy.name, is_demoted=decision.request.objective != objective)
        return placement, self._announce(placement, request, handles, asked=objective, explain=explain)

    def _count(self, placement: Placement, policy: str, *, is_demoted: bool) -> None:
        self._metrics.decision_s.labels(policy).observe(placement.decision_s)
        self._metrics.decisions.labels(policy, placement.basis.value).inc()
        if placement.disaggregation:
            self._metrics.disaggregations.labels(policy, placement.disaggregation).inc()
        if is_demoted:
            self._metrics.demoted.inc()
        elif placement.decision.deadlines_dropped:
            self._metrics.served_late.labels(placement.decision.deadlines_dropped).inc()

    async def _complete(self, request: common_pb2.Request, prompt: bytes, policy: Policy) -> None:
        """Fill in the length and what else forecasts need; ValueError where the request is invalid."""
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
        """Return a placement in its wire form; the listeners get both, unless it is a dry run.

        `asked` is the objective before the decision, which may have demoted the request.
        """

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

    def sent_elsewhere(self, request: common_pb2.Request, instance_id: str) -> None:
        """Count a request that another party sends to an instance without a reservation."""
        handle = self.registry.find(instance_id)
        if handle is not None:
            handle.sent_without_reservation(request.prompt_tokens)
