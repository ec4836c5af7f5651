"""A pool's requests, as schedulers report them, and the plans of its rule."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

from protos.block.v1 import common_pb2
from protos.block.v1 import provisioner_pb2 as pb
from scheduler.provisioning import TIERS, rule_from
from scheduler.provisioning.history import PlacedRequest, PoolHistory
from scheduler.provisioning.planner import Planner, ScalingDecision
from scheduler.provisioning.pool_state import PoolState, Rule, TierNeeds
from scheduler.provisioning.tier_planner import TierInstance, TierPlan, TierPlanner
from services.provisioner_server.metrics import ProvisionerMetrics
from services.provisioner_server.settings import ProvisionerSettings
from services.rpc.messages import require_name

MAX_SCHEDULERS = 4096
WAITING_FRESH_S = 2.0  # for which a report of waiting requests counts
ENDED = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


class Pool:
    """One pool's requests. Times are those of receiving a report, by this machine's clock."""

    def __init__(self, settings: ProvisionerSettings, metrics: ProvisionerMetrics) -> None:
        """Start without requests."""
        self.settings = settings
        self.history = PoolHistory(settings.objectives, settings.limits)
        self._metrics = metrics
        self._planner = Planner(self.rule_named(settings.rule), settings.limits, self.history)
        self._sequences: dict[str, int] = {}
        self.tiers = settings.read_tiers()
        self._tier_planner = TierPlanner(self.tiers, hold_s=settings.tier_hold_s, settle_s=settings.settle_s)
        self._waiting: dict[str, tuple[float, dict[float, int]]] = {}  # by scheduler: since when, by target
        self.tier_needs = TierNeeds() if self.tiers else None  # by the last plan of tiers

    def rule_named(self, name: str) -> Rule:
        """Make a rule by its name."""
        if TIERS in name.split("+") and not self.settings.tiers:
            raise ValueError("rule: tiers needs a file of them (--tiers)")
        return rule_from(name, self.settings.objectives, self.settings.schedule if "schedule" in name else "")

    def receive(self, report: pb.ReportRequest) -> bool:
        """Take a report; a repeated one, or one of another pool, is ignored."""
        require_name("scheduler_id", report.scheduler_id)
        event = report.WhichOneof("event") or "none"
        if report.HasField("waiting"):
            is_taken = self._take_waiting(report.scheduler_id, report.waiting, time.monotonic())
        else:
            is_taken = self._is_new(report) and self._take(report, time.monotonic())
        self._metrics.reports.labels(event, "yes" if is_taken else "no").inc()
        return is_taken

    def _is_new(self, report: pb.ReportRequest) -> bool:
        if report.sequence and report.sequence <= self._sequences.get(report.scheduler_id, 0):
            return False
        if report.scheduler_id not in self._sequences and len(self._sequences) >= MAX_SCHEDULERS:
            del self._sequences[next(iter(self._sequences))]
        self._sequences[report.scheduler_id] = report.sequence
        return True

    def _take(self, report: pb.ReportRequest, now_s: float) -> bool:
        if report.HasField("placement"):
            return self._placed(report.placement, now_s)
        if report.HasField("outcome"):
            outcome = report.outcome
            require_name("outcome.request_id", outcome.request_id)
            whole = outcome.finish_reason in ENDED and outcome.HasField("e2e_s")
            if whole and not (math.isfinite(outcome.e2e_s) and outcome.e2e_s >= 0):
                raise ValueError(f"outcome.e2e_s: must be a time from 0 on, not {outcome.e2e_s}")
            self.history.add_end(now_s, outcome.request_id, outcome.e2e_s if whole else None)
            return True
        return False

    def _take_waiting(self, scheduler_id: str, waiting: pb.WaitingRequests, now_s: float) -> bool:
        for target in waiting.targets:
            if not target.tpot_slo_s > 0:
                raise ValueError(f"waiting.targets.tpot_slo_s: must be a time above 0, not {target.tpot_slo_s}")
        if scheduler_id not in self._waiting and len(self._waiting) >= MAX_SCHEDULERS:
            del self._waiting[next(iter(self._waiting))]
        self._waiting[scheduler_id] = (now_s, {target.tpot_slo_s: target.num for target in waiting.targets})
        return True

    def waiting_targets(self) -> dict[float, int]:
        """Count the waiting requests of all schedulers by target; those of a scheduler that is silent are left out."""
        now_s, found = time.monotonic(), Counter[float]()
        for at_s, targets in self._waiting.values():
            if now_s - at_s <= WAITING_FRESH_S:
                found.update(targets)
        return dict(found)

    def plan_tiers(self, instances: Sequence[TierInstance]) -> TierPlan:
        """Return the moves between tiers that are to be made now, and note what the tiers lack."""
        plan = self._tier_planner.plan(time.monotonic(), instances, self.waiting_targets())
        self.tier_needs = plan.needs
        return plan

    def _placed(self, placement: pb.Placement, now_s: float) -> bool:
        if placement.pool not in ("", self.settings.pool) or not placement.HasField("forecast"):
            return False
        require_name("placement.request_id", placement.request_id)
        require_name("placement.instance_id", placement.instance_id)
        if math.isnan(placement.forecast.e2e_s) or placement.forecast.e2e_s < 0:
            raise ValueError(f"placement.forecast.e2e_s: must be a time from 0 on, not {placement.forecast.e2e_s}")
        self.history.add_placement(
            now_s,
            PlacedRequest(
                request_id=placement.request_id,
                instance_id=placement.instance_id,
                prompt_tokens=placement.prompt_tokens,
                output_tokens=placement.output_tokens or placement.forecast.output_tokens,
                e2e_s=placement.forecast.e2e_s,
                next_best_e2e_s=placement.next_best_e2e_s if placement.HasField("next_best_e2e_s") else math.nan,
            ),
        )
        return True

    def state(self, num_ready: int, num_starting: int) -> PoolState:
        """Return the present state of the pool."""
        return self.history.state(time.monotonic(), num_ready=num_ready, num_starting=num_starting, unix_s=time.time())

    def plan(self, ready: list[str], num_starting: int, rule: Rule | None = None) -> ScalingDecision:
        """Return what is to be done now."""
        return self._planner.plan(
            time.monotonic(), ready, num_starting, unix_s=time.time(), rule=rule, tiers=self.tier_needs
        )

    def started(self, decision: ScalingDecision) -> None:
        """Note that a decision is being carried out."""
        self._planner.applied(time.monotonic(), decision)

    def cooldown_left_s(self) -> float:
        """Return the time during which nothing more is started."""
        return self._planner.cooldown_left_s(time.monotonic())
