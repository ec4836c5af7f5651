"""The outcome of a request, as gateways, schedulers and endpoint pickers report it."""

from __future__ import annotations

import time

from protos.block.v1 import common_pb2
from services.http.reply_format import CANCELLED, FAILED
from services.rpc.request_groups import num_responses_of


def outcome_of(  # noqa: PLR0913 - what an outcome says
    request: common_pb2.Request,
    decision: common_pb2.Decision | None,
    *,
    instance_id: str,
    policy: str,
    reason: common_pb2.FinishReason.ValueType,
    arrived_s: float,
    first_s: float | None,
    last_s: float | None,
    output_tokens: int,
    prompt_tokens: int | None,
    prefix_hit_tokens: int = 0,
    prefill_instance_id: str = "",
    prefill_s: float | None = None,
    hand_over_s: float | None = None,
    migration: str = "",
) -> common_pb2.Outcome:
    """Write the outcome of a request on one instance, by the decision that placed it there, if there was one.

    The request arrived at `arrived_s` (monotonic), and its answer came from `first_s` to `last_s`; the time of an
    answer that is not whole is that up to now.
    """
    is_whole = last_s is not None and reason not in (CANCELLED, FAILED)
    e2e_s = (last_s if is_whole and last_s is not None else time.monotonic()) - arrived_s
    ttft_s = None if first_s is None else first_s - arrived_s
    num_responses = num_responses_of(request)
    tokens_each = output_tokens / num_responses  # their tokens come side by side
    return common_pb2.Outcome(
        request_id=request.request_id,
        instance_id=instance_id,
        model=request.model,
        session_id=request.session_id,
        client_id=request.client_id,
        prompt_tokens=prompt_tokens or request.prompt_tokens,
        output_tokens=output_tokens,
        finish_reason=reason,
        prefix_hit_tokens=prefix_hit_tokens,
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        tpot_s=None if ttft_s is None or tokens_each < 2 else (e2e_s - ttft_s) / (tokens_each - 1),
        tag=decision.tag if decision is not None and decision.HasField("tag") else None,
        forecast=decision.forecast if decision is not None and decision.HasField("forecast") else None,
        policy=policy,
        finished_unix_s=request.arrival_unix_s + e2e_s if request.arrival_unix_s else time.time(),
        prefill_instance_id=prefill_instance_id,
        prefill_s=prefill_s,
        hand_over_s=hand_over_s,
        migration=migration,
        num_sequences=num_responses if num_responses > 1 else 0,
    )
