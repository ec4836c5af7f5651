"""Requests, instances and counters as the live page gets them: plain values for JSON, rounded, without infinities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.metrics_core import Metric

from protos.block.v1 import common_pb2
from services.placement.decision_log import LoggedDecision
from services.placement.instance_handle import InstanceHandle

Record = dict[str, Any]

# Indicators of an instance that the page shows.
SHOWN = (
    "num_running", "num_waiting", "num_reserved", "num_total_blocks", "num_free_blocks", "num_reserved_blocks",
    "queued_prefill_tokens", "drained_s", "pace", "step_s", "kv_hit_ratio", "num_preemptions_total", "num_fetching",
)  # fmt: skip
# Metrics that the page shows, as samples of a registry.
COUNTERS = (
    "block_gateway_slo_requests_total", "block_gateway_slo_attained_total", "block_gateway_targets_total",
    "block_gateway_targets_attained_total", "block_gateway_requests_total", "block_gateway_finished_total",
    "block_gateway_requests_under_way", "block_held_requests", "block_holds_total", "block_scheduler_shed_total",
    "block_scheduler_demoted_total", "block_undecided_total", "block_decisions_total", "block_decision_seconds_sum",
    "block_decision_seconds_count", "block_scheduler_forecast_error_ratio_sum",
    "block_scheduler_forecast_error_ratio_count",
)  # fmt: skip
MAX_TEXT = 200  # characters of a text that a client chose
DIGITS = 5


def number(value: float) -> float | None:
    """Round a number; None for one that JSON cannot hold."""
    return round(value, DIGITS) if math.isfinite(value) else None


def placed_record(request: common_pb2.Request, message: common_pb2.Decision, waited_s: float) -> Record:
    """Describe a placed request; predicted times count from its arrival, which was `waited_s` before the decision."""
    return {
        **_decision_record(message, waited_s),
        "client": request.client_id[:MAX_TEXT],
        "prompt_tokens": request.prompt_tokens,
    }


def logged_record(logged: LoggedDecision) -> Record:
    """Describe a request that was placed some time ago."""
    placement = logged.placement
    request = placement.decision.request
    return {
        **_decision_record(logged.message, request.waited_s + placement.held_s + placement.decision_s),
        "client": request.client_id[:MAX_TEXT],
        "prompt_tokens": request.indicators.prompt_tokens,
    }


def _decision_record(message: common_pb2.Decision, waited_s: float) -> Record:
    record: Record = {
        "id": message.request_id,
        "instance": message.instance.instance_id,
        "arrived": number(message.decided_unix_s - waited_s),
        "decided": number(message.decided_unix_s),
        "decision_s": number(message.decision_s),
        "policy": message.policy[:MAX_TEXT],
        "candidates": message.num_candidates,
        "skipped": message.num_skipped,
        "why": message.why[:MAX_TEXT],
    }
    if message.HasField("forecast"):
        record["predicted_ttft_s"] = number(waited_s + message.forecast.ttft_s)
        record["predicted_e2e_s"] = number(waited_s + message.forecast.e2e_s)
    if message.HasField("tag"):
        record["tag_tokens"] = number(message.tag.median_tokens)
    if message.HasField("prefill"):
        record["prefill"] = message.prefill.instance.instance_id
    if message.demoted:
        record["demoted"] = True
    return record


def ended_record(outcome: common_pb2.Outcome) -> Record:
    """Describe how a request ended."""
    return {
        "id": outcome.request_id,
        "end": reason_name(outcome.finish_reason),
        "ended": number(outcome.finished_unix_s) or None,
        "ttft_s": number(outcome.ttft_s) if outcome.HasField("ttft_s") else None,
        "e2e_s": number(outcome.e2e_s) if outcome.HasField("e2e_s") else None,
        "output_tokens": outcome.output_tokens,
    }


def reason_name(reason: common_pb2.FinishReason.ValueType) -> str:
    """Return how an answer ended in a word; `unknown` where nothing was reported."""
    name = common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
    return "unknown" if name == "unspecified" else name


def instance_record(handle: InstanceHandle, now_s: float) -> Record:
    """Describe an instance: its state, and what it last reported."""
    status, message = handle.status, handle.message
    candidate = status.unhealthy_candidate(now_s)
    state, note = ("ready", "") if candidate is None else (candidate.status.value, candidate.note)
    if candidate is None and handle.is_silent:
        state, note = "silent", "its sidecar does not report"
    record: Record = {
        "id": status.instance_id,
        "role": status.role,
        "tier": message.tier[:MAX_TEXT],
        "models": list(message.models)[:4],
        "state": state,
        "note": note,
        "age_s": number(status.age_at(now_s)) if status.indicators else None,
    }
    if status.tier_tpot_s < math.inf:
        record["tier_tpot_s"] = number(status.tier_tpot_s)
    record |= {name: number(value) for name, value in status.indicators.items() if name in SHOWN}
    return record


def counter_records(metrics: Iterable[Metric]) -> list[list[Any]]:
    """Return samples as [name, labels, value]."""
    return [[sample.name, labels_of(sample.labels), number(sample.value)] for one in metrics for sample in one.samples]


def labels_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels, cut where they are long."""
    return {name: value[:MAX_TEXT] for name, value in labels.items()}
