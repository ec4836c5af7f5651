"""One reading of a cluster: its instances as their sidecars see them, and its rates by its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from protos.block.v1 import common_pb2
from services.top.counts import Counted

STATES = {
    common_pb2.INSTANCE_STATE_UNSPECIFIED: "unknown",
    common_pb2.INSTANCE_STATE_STARTING: "starting",
    common_pb2.INSTANCE_STATE_READY: "ready",
    common_pb2.INSTANCE_STATE_DRAINING: "draining",
    common_pb2.INSTANCE_STATE_DOWN: "down",
}


REPLIES = "block_gateway_requests_total"
PATHS = ("/v1/completions", "/v1/chat/completions")
ERRORS = ("500", "502", "503", "504")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReading:
    """One instance; what is not known is None."""

    instance: str
    role: str
    tier: str
    state: str
    running: int | None = None
    waiting: int | None = None
    reserved: int | None = None
    kv_usage: float | None = None
    queued_prefill_tokens: int | None = None
    drained_s: float | None = None
    pace: float | None = None
    age_s: float | None = None
    requests_per_s: float | None = None
    forecast_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReading:
    """All instances, and the cluster's rates."""

    scheduler: str
    policy: str
    instances: Sequence[InstanceReading]
    requests_per_s: float | None = None
    errors_per_s: float | None = None
    under_way: float | None = None
    decisions_per_s: float | None = None
    decision_s: float | None = None
    held: float | None = None
    shed_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    e2e_p95_s: float | None = None
    attained: float | None = None
    problems: Sequence[str] = ()

    def json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def added(rates: Iterable[float | None]) -> float | None:
    """Add what is known; None where nothing is."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None


def instance_reading(
    instance: common_pb2.Instance,
    state: common_pb2.InstanceState.ValueType,
    indicators: common_pb2.Indicators | None,
    age_s: float | None,
    counted: Counted,
) -> InstanceReading:
    """Combine what a scheduler, a sidecar and metrics say of an instance."""
    seen = indicators or common_pb2.Indicators()

    def value(name: str) -> Any:
        found = getattr(seen, name)
        is_known = seen.HasField(name) and math.isfinite(found)  # type: ignore[arg-type]
        return found if is_known else None

    total, free = value("num_total_blocks"), value("num_free_blocks")
    return InstanceReading(
        instance=instance.instance_id,
        role=instance.role or "both",
        tier=instance.tier,
        state=STATES.get(state, "unknown"),
        running=value("num_running"),
        waiting=value("num_waiting"),
        reserved=value("num_reserved"),
        kv_usage=None if not total or free is None else 1 - free / total,
        queued_prefill_tokens=value("queued_prefill_tokens"),
        drained_s=value("drained_s"),
        pace=value("pace"),
        age_s=age_s,
        requests_per_s=counted.rate("block_placements_total", instance=instance.instance_id),
        forecast_error=counted.mean("block_scheduler_forecast_error_ratio", instance=instance.instance_id),
    )


def cluster_reading(
    scheduler: str, policy: str, instances: Sequence[InstanceReading], counted: Counted, problems: Sequence[str]
) -> ClusterReading:
    """Add the cluster's rates."""
    asked, kept = (counted.increase(f"block_gateway_slo_{name}_total") for name in ("requests", "attained"))
    requests = added(counted.rate(REPLIES, path=path) for path in PATHS)
    decisions, shed = counted.rate("block_decisions_total"), counted.rate("block_scheduler_shed_total")
    errors = added(counted.rate(REPLIES, path=path, status=status) for path in PATHS for status in ERRORS)
    return ClusterReading(
        scheduler=scheduler,
        policy=policy,
        instances=instances,
        requests_per_s=requests,
        errors_per_s=0.0 if errors is None and requests is not None else errors,  # without one there is no series
        under_way=counted.after.total("block_gateway_requests_under_way"),
        decisions_per_s=decisions,
        decision_s=counted.mean("block_decision_seconds"),
        held=counted.after.total("block_held_requests"),
        shed_per_s=0.0 if shed is None and decisions is not None else shed,
        ttft_p50_s=counted.quantile(0.5, "block_gateway_ttft_seconds"),
        ttft_p95_s=counted.quantile(0.95, "block_gateway_ttft_seconds"),
        e2e_p95_s=counted.quantile(0.95, "block_gateway_e2e_seconds"),
        attained=kept / asked if asked and kept is not None else None,
        problems=problems,
    )
