"""What spans say of a request, a decision and an outcome: OpenTelemetry's names for generative AI, and `block.*`."""

from __future__ import annotations

from protos.block.v1 import common_pb2
from services.http.openai_body import OpenAIRequest

Found = dict[str, str | bool | int | float | list[str] | None]

BASES = {
    common_pb2.DECISION_BASIS_FORECAST: "forecast",
    common_pb2.DECISION_BASIS_INDICATORS: "indicators",
    common_pb2.DECISION_BASIS_BLIND: "blind",
    common_pb2.DECISION_BASIS_LAST_RESORT: "last_resort",
}
REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
    common_pb2.FINISH_REASON_FAILED: "error",
}


def request_attributes(openai: OpenAIRequest, request: common_pb2.Request) -> Found:
    """Say what a client asks for."""
    return {
        "gen_ai.operation.name": openai.operation,
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": openai.model or None,
        "gen_ai.request.max_tokens": openai.max_tokens,
        "gen_ai.request.stream": openai.stream,
        "gen_ai.conversation.id": request.session_id or None,
        "block.request_id": request.request_id,
        "block.client": request.client_id or None,
        "block.objective": request.objective or None,
    }


def decision_attributes(decision: common_pb2.Decision) -> Found:
    """Say where a request goes, and what that was decided by."""
    found: Found = {
        "block.instance": decision.instance.instance_id,
        "block.policy": decision.policy,
        "block.basis": BASES.get(decision.basis),
        "block.candidates": decision.num_candidates,
        "block.skipped": decision.num_skipped,
        "block.decision_ms": decision.decision_s * 1e3,
        "block.scheduler": decision.scheduler_id or None,
        "block.disaggregation": decision.disaggregation or None,
        "block.demoted": decision.demoted or None,
    }
    if decision.HasField("held_s"):
        found["block.held_ms"] = decision.held_s * 1e3
    if decision.HasField("state_age_s"):
        found["block.state_age_ms"] = decision.state_age_s * 1e3
    if decision.HasField("prefill"):
        found["block.prefill_instance"] = decision.prefill.instance.instance_id
    if decision.HasField("tag"):
        found["block.tag_tokens"], found["block.tag_source"] = decision.tag.median_tokens, decision.tag.estimator
    if decision.HasField("forecast"):
        found["block.predicted_ttft_ms"] = decision.forecast.ttft_s * 1e3
        found["block.predicted_e2e_ms"] = decision.forecast.e2e_s * 1e3
        found["block.predicted_tokens"] = decision.forecast.output_tokens
    return found


def outcome_attributes(outcome: common_pb2.Outcome) -> Found:
    """Say how a request ended, and how far its forecast was off; times are from its arrival."""
    found: Found = {
        "gen_ai.usage.input_tokens": outcome.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.output_tokens,
        "block.actual_e2e_ms": outcome.e2e_s * 1e3,
    }
    if outcome.finish_reason in REASONS:
        found["gen_ai.response.finish_reasons"] = [REASONS[outcome.finish_reason]]
    if outcome.HasField("ttft_s"):
        found["gen_ai.response.time_to_first_chunk"] = outcome.ttft_s
        found["block.actual_ttft_ms"] = outcome.ttft_s * 1e3
    if outcome.HasField("forecast") and outcome.finish_reason in (
        common_pb2.FINISH_REASON_STOP,
        common_pb2.FINISH_REASON_LENGTH,
    ):
        found["block.e2e_error_ratio"] = relative(outcome.forecast.e2e_s, outcome.e2e_s)
        if outcome.HasField("ttft_s"):
            found["block.ttft_error_ratio"] = relative(outcome.forecast.ttft_s, outcome.ttft_s)
    return found


def relative(predicted: float, actual: float) -> float | None:
    """Return the error of a forecast, relative to what happened."""
    return (predicted - actual) / actual if actual > 0 else None
