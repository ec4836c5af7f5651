"""Spans of requests through the gateway: one tree with the scheduler's below, and the engine's own would be below a leg."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import httpx
import pytest
from prometheus_client import CollectorRegistry

from protos.block.v1 import scheduler_pb2_grpc
from services.gateway.server import serving
from services.gateway.settings import GatewaySettings
from services.instances.sources import Listed
from services.placement.settings import SchedulerSettings
from services.rpc.server import serving as rpc_serving
from services.rpc.settings import ServerSettings
from services.scheduler_server import scheduling
from tests.services.gateway.stubs import LOCAL, Call, Engine, completes, engines, scene, streams
from tests.services.gateway.test_disaggregating import Prefill, drops, pools
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import LIMIT_S, PATIENCE_S, run

pytest.importorskip("opentelemetry.sdk")

from tests.services.span_recorder import SPAN, TRACE, SpanRecorder

REQUEST = {"model": "tiny", "prompt": "Say hello", "max_tokens": 3}
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


def ids_in(call: Call | httpx.Response) -> tuple[str, str, str]:
    """The trace, the span and the flags that an engine received."""
    _, trace, span, flags = call.headers["traceparent"].split("-")
    return trace, span, flags


@asynccontextmanager
async def through_a_scheduler(recorder: SpanRecorder) -> AsyncIterator[tuple[httpx.AsyncClient, Engine]]:
    """Run a gateway, a real scheduler with a stub sidecar, and a stub engine; both servers record to one place."""
    async with AsyncExitStack() as stack:
        (engine,) = await stack.enter_async_context(engines(streams))
        (stub,) = await stack.enter_async_context(sidecars("one"))
        stub.engine_url, stub.models = engine.url, ("tiny",)
        settings = SchedulerSettings(scheduler_id="s", sidecar_deadline_s=PATIENCE_S)
        registry = CollectorRegistry()
        service = await stack.enter_async_context(
            scheduling(settings, Listed([stub.instance]), registry, 0.01, recorder.tracer)
        )
        register = partial(scheduler_pb2_grpc.add_SchedulerServicer_to_server, service)
        rpc = await stack.enter_async_context(rpc_serving(ServerSettings(), [register], registry))
        gateway = GatewaySettings(schedulers=(f"{LOCAL}:{rpc.port}",), schedule_s=PATIENCE_S, connect_s=PATIENCE_S)
        here = await stack.enter_async_context(serving(gateway, ServerSettings(), tracer=recorder.tracer))
        client = httpx.AsyncClient(base_url=f"http://{LOCAL}:{here.port}", timeout=LIMIT_S)
        yield await stack.enter_async_context(client), engine


def test_one_request_is_one_tree() -> None:
    """Gateway, scheduler and the engine's parent; with what was predicted, what happened, and the client's trace."""

    async def test() -> None:
        recorder = SpanRecorder(share=0.0)  # the client's flag decides
        async with through_a_scheduler(recorder) as (client, engine):
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1", "x-session-id": "mine"}
            reply = await client.post("/v1/completions", json={**REQUEST, "stream": True}, headers=headers)
            assert reply.status_code == 200
            schedule = {"block.schedule": {"block.v1.Scheduler/Schedule": {}}}
            assert await recorder.tree("text_completion tiny") == {
                "text_completion tiny": {**schedule, "block.serve": {}}
            }
            metrics = await client.get("/metrics", headers=OPENMETRICS)
        assert {f"{span.context.trace_id:032x}" for span in recorder.spans} == {TRACE}
        own, leg = recorder.named("text_completion tiny"), recorder.named("block.serve")
        assert own.parent is not None
        assert f"{own.parent.span_id:016x}" == SPAN
        assert ids_in(engine.calls[0]) == (TRACE, f"{leg.context.span_id:016x}", "01")
        assert engine.calls[0].headers["tracestate"] == "vendor=1"
        assert f'trace_id="{TRACE}"' in metrics.text

        asked, done = dict(own.attributes or {}), recorder.named("block.v1.Scheduler/Schedule")
        assert asked["gen_ai.operation.name"] == "text_completion"
        assert asked["gen_ai.request.model"] == "tiny"
        assert asked["gen_ai.request.max_tokens"] == 3
        assert asked["gen_ai.conversation.id"] == "mine"
        assert asked["gen_ai.usage.output_tokens"] == 3
        assert asked["gen_ai.response.finish_reasons"] == ("length",)
        assert asked["http.response.status_code"] == 200
        assert asked["block.actual_e2e_ms"] >= asked["block.actual_ttft_ms"] > 0
        predicted = 2000.0  # by the stub sidecar
        actual_ms = asked["block.actual_e2e_ms"]
        assert asked["block.e2e_error_ratio"] == pytest.approx((predicted - actual_ms) / actual_ms)
        assert own.kind.name == done.kind.name == "SERVER"
        assert leg.kind.name == "CLIENT"
        assert (leg.attributes or {})["block.instance"] == "one"
        for span in (done, recorder.named("block.schedule")):
            decided = dict(span.attributes or {})
            assert decided["block.policy"] == "block"
            assert decided["block.instance"] == "one"
            assert decided["block.candidates"] == 1
            assert decided["block.predicted_e2e_ms"] == predicted
            assert decided["block.tag_tokens"] > 0
            assert decided["block.tag_source"]

    run(test)


def test_what_is_not_sampled_has_no_span() -> None:
    """Neither here nor in the engine, which gets the flag; a client's own ids stay."""

    async def test() -> None:
        recorder = SpanRecorder(share=0.4)
        async with through_a_scheduler(recorder) as (client, engine):
            headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
            assert (await client.post("/v1/completions", json=REQUEST)).status_code == 200
            assert (await client.post("/v1/completions", json=REQUEST, headers=headers)).status_code == 200
            assert "trace_id" not in (await client.get("/metrics", headers=OPENMETRICS)).text
        assert recorder.spans == []
        assert ids_in(engine.calls[0])[2] == "00"
        assert ids_in(engine.calls[1]) == (TRACE, SPAN, "00")

    run(test)


def test_a_share_starts_traces_of_its_own() -> None:
    """Exemplars name them."""

    async def test() -> None:
        recorder = SpanRecorder(share=0.6)
        async with scene(streams, tracer=recorder.tracer) as here:
            await here.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], prompt=None, stream=True
            )
            await recorder.tree("chat tiny")
            metrics = (await here.client.get("/metrics", headers=OPENMETRICS)).text
        assert f'trace_id="{recorder.named("chat tiny").context.trace_id:032x}"' in metrics

    run(test)


def test_without_a_tracer_the_clients_header_passes() -> None:
    """As any other header."""

    async def test() -> None:
        async with scene(completes) as here:
            await here.post(headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
            await here.post()
            assert ids_in(here.engines[0].calls[0]) == (TRACE, SPAN, "01")
            assert "traceparent" not in here.engines[0].calls[1].headers

    run(test)


def test_legs_and_attempts_are_children() -> None:
    """A decode instance that fails and the one after it have the same parent, and each its own span."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with pools([Prefill()], [drops, completes], tracer=recorder.tracer) as here:
            assert (await here.post()).status_code == 200
            await recorder.tree("text_completion tiny")
            (own,) = (span for span in recorder.spans if span.name == "text_completion tiny")
            assert own.context is not None
            children = [span for span in recorder.spans if span.parent and span.parent.span_id == own.context.span_id]
            names = [span.name for span in children]
            assert names[:3] == ["block.schedule", "block.prefill", "block.decode"]
            assert names[3] == "block.schedule"
            failed = children[2]
            assert failed.status.status_code.name == "ERROR"
            assert (failed.attributes or {})["error.type"] == "failed"
            sent = [ids_in(call)[1] for engine in here.engines for call in engine.calls]
            legs = [
                f"{span.context.span_id:016x}" for span in children if span.name != "block.schedule" and span.context
            ]
            assert sorted(sent) == sorted(legs)
            assert own.status.status_code.name == "UNSET"

    run(test)


def test_a_request_that_fails() -> None:
    """Its span and that of the decision have the status as their error."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with scene(tracer=recorder.tracer) as here:
            assert (await here.post()).status_code == 503
            await recorder.tree("text_completion tiny")
        for name in ("text_completion tiny", "block.schedule"):
            span = recorder.named(name)
            assert (span.attributes or {})["error.type"] == "503"
            assert span.status.status_code.name == "ERROR"

    run(test)
