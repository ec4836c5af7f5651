"""The prefill leg of a generation: one instance computes the prompt, and holds the KV blocks for another one."""

from __future__ import annotations

from prometheus_client import Counter

from protos.block.v1 import common_pb2
from services.http.client import HttpClient
from services.http.data_parallel import with_rank
from services.http.kv_transfer import KV_CONNECTORS
from services.http.origin import origin_of
from services.http.prefill_leg import SKIPPED, HeldBlocks, PrefillLeg
from services.http.proxying import OK
from services.instances.instance import REMOVED_FROM_LIST
from services.placement.current_request import CurrentRequest
from services.placement.upstream_engine import MAX_ERROR_BYTES, EngineError, error_of
from services.tracing.request_spans import PREFILL, end_prefill

MAX_PREFILL_BYTES = 16 * 2**20  # of a reply


class PrefillError(EngineError):
    """The instance of the prefill leg failed."""


async def prefill(
    current: CurrentRequest,
    decision: common_pb2.Decision,
    entered_s: float,
    client: HttpClient,
    results: Counter,
) -> HeldBlocks | None:
    """Have the prompt computed, unless one engine serves the request; return the KV blocks that are held for it.

    `results` counts how prefill legs end.
    """
    driver, spans = current.driver, current.spans
    settings, instance_id = driver.settings, decision.prefill.instance.instance_id
    leg = PrefillLeg(
        request=current.message.request, instance_id=instance_id, policy=decision.policy, arrived_s=entered_s
    )
    span = None
    try:
        if current.undivided or current.held is not None:
            leg.result = SKIPPED
            return current.held
        handle = driver.registry.find(instance_id)
        if handle is None:
            raise PrefillError(REMOVED_FROM_LIST)
        span = spans.leg(PREFILL, decision.prefill.instance, decision.policy)
        reply = await leg.send(
            client,
            origin_of(handle.instance.engine_url),
            target=current.to_send.path,
            headers=with_rank(spans.traced(current.to_send, span).headers(), handle.instance.data_parallel_rank),
            body=current.to_send.body_for(handle.instance.models),
            connector=KV_CONNECTORS[settings.kv_connector],
            within_s=settings.first_token_s,
            max_bytes=MAX_PREFILL_BYTES,
        )
    except (ConnectionError, TimeoutError) as error:
        raise PrefillError(str(error) or "the engine did not answer in time") from None
    finally:
        results.labels(leg.result).inc()
        end_prefill(span, leg.result)
        driver.outcomes.ended(leg.outcome())
    if reply.status != OK:
        refusal = error_of(reply.status, reply.body[:MAX_ERROR_BYTES])
        raise PrefillError(str(refusal)) if isinstance(refusal, EngineError) else refusal
    return leg.held
