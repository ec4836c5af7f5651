"""Spans of requests through the picker: request, decision and leg, and the engine's parent by header mutation."""

from __future__ import annotations

import pytest

from tests.services.endpoint_picker.running import NONE, Proxy, completion, head, picking, set_headers
from tests.services.endpoint_picker.test_responses import STREAM, WHOLE, placed
from tests.services.gateway.stubs import DONE, completes, event
from tests.services.waiting import run

pytest.importorskip("opentelemetry.sdk")

from tests.services.span_recorder import SAMPLED, SPAN, TRACE, UNSAMPLED, SpanRecorder, attributes_of, id_of

REQUEST = "text_completion tiny"


def traceparent(one: Proxy) -> str | None:
    """Return the header that the proxy is to set."""
    return set_headers(one.received[0].request_headers.response.header_mutation).get("traceparent")


async def answered(one: Proxy, kind: str, *pieces: bytes) -> None:
    """Show a whole response."""
    await one.respond(kind=kind)
    await one.read()
    for piece in pieces:
        await one.respond_body(piece, end=piece is pieces[-1])
        await one.read()


def test_one_request_is_one_tree() -> None:
    """Below the proxy's span; the engine's own span is below the leg."""

    async def test() -> None:
        recorder = SpanRecorder(share=0.0)  # the proxy's flag decides
        async with picking(completes, tracer=recorder.tracer) as here:
            one = await placed(here, head(traceparent=SAMPLED, x_session_id="mine"))
            await answered(one, STREAM, event("Hello"), event("!", "length") + DONE)
            assert await recorder.tree(REQUEST) == {REQUEST: {"block.schedule": {}, "block.serve": {}}}
        own, leg = recorder.named(REQUEST), recorder.named("block.serve")
        assert own.parent is not None
        assert f"{own.parent.span_id:016x}" == SPAN
        assert traceparent(one) == f"00-{TRACE}-{id_of(leg)}-01"
        assert (own.kind.name, leg.kind.name) == ("SERVER", "CLIENT")
        found = attributes_of(own)
        assert found["gen_ai.operation.name"] == "text_completion"
        assert found["gen_ai.conversation.id"] == "mine"
        assert found["gen_ai.usage.output_tokens"] == 2
        assert found["gen_ai.response.finish_reasons"] == ("length",)
        assert found["http.response.status_code"] == 200
        actual_ms = found["block.actual_e2e_ms"]
        assert found["block.e2e_error_ratio"] == pytest.approx((2000.0 - actual_ms) / actual_ms)
        decided = attributes_of(recorder.named("block.schedule"))
        assert (decided["block.policy"], decided["block.instance"], decided["block.candidates"]) == ("block", "a", 1)
        assert decided["block.predicted_e2e_ms"] == 2000.0
        assert attributes_of(leg)["server.port"] == here.engines[0].port

    run(test)


def test_what_is_not_sampled_has_no_span() -> None:
    """The engine gets the flag; a header that says so already stays."""

    async def test() -> None:
        recorder = SpanRecorder(share=0.4)
        async with picking(completes, tracer=recorder.tracer) as here:
            drawn, told = await placed(here), await placed(here, head(traceparent=UNSAMPLED))
            for one in (drawn, told):
                await answered(one, "application/json", WHOLE)
        assert recorder.spans == []
        assert (traceparent(drawn) or "").endswith("-00")
        assert traceparent(told) is None

    run(test)


def test_without_a_tracer_headers_stay() -> None:
    """The proxy passes its own one on."""

    async def test() -> None:
        async with picking(completes) as here:
            assert traceparent(await placed(here, head(traceparent=SAMPLED))) is None

    run(test)


@pytest.mark.parametrize(("status", "error"), [(200, None), (400, None), (429, "failed"), (503, "503")])
def test_responses_with_other_statuses(status: int, error: str | None) -> None:
    """An engine that fails is the leg's error; what blames the client is none."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with picking(completes, tracer=recorder.tracer) as here:
            one = await placed(here)
            await one.respond(status)
            await one.read()
            await one.respond_body(WHOLE if status == 200 else b"{}")
            await one.read()
            await recorder.children(REQUEST)
        leg, own = attributes_of(recorder.named("block.serve")), attributes_of(recorder.named(REQUEST))
        assert leg.get("error.type") == error
        assert own.get("error.type") == (error if status >= 500 else None)
        assert own["http.response.status_code"] == status

    run(test)


def test_a_request_that_is_refused() -> None:
    """Its span has the picker's own status; there is no leg."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with picking(completes, tracer=recorder.tracer) as here:
            one = Proxy(call=here.stub.Process())
            await one.send_headers(head())
            await one.send_body(completion(model="other"))
            assert (await one.read()).immediate_response.status.code == 404
            assert await recorder.tree("text_completion other") == {"text_completion other": {"block.schedule": {}}}
        found = attributes_of(recorder.named("text_completion other"))
        assert (found["http.response.status_code"], found.get("error.type")) == (404, None)

    run(test)


@pytest.mark.parametrize("responding", [False, True])
def test_a_client_that_leaves(responding: bool) -> None:
    """Before the response or within it: request and leg end as such."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with picking(completes, tracer=recorder.tracer) as here:
            one = await placed(here)
            if responding:
                await one.respond(kind=STREAM)
                await one.respond_body(event("Hel"), end=False)
                await one.read()
                await one.read()
            one.call.cancel()
            await recorder.children(REQUEST)
        for name in (REQUEST, "block.serve"):
            assert attributes_of(recorder.named(name))["error.type"] == "client_left"

    run(test)


def test_the_instance_that_served_is_named() -> None:
    """Where the proxy had to take a further endpoint."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with picking(completes, completes, tracer=recorder.tracer) as here:
            here.sidecars[1].e2e_s = 9.0
            one = await placed(here)
            await one.respond(served=here.endpoints[1])
            await one.read()
            await one.respond_body(WHOLE)
            await one.read()
            await recorder.children(REQUEST)
        leg = attributes_of(recorder.named("block.serve"))
        assert (leg["block.instance"], leg["block.served_elsewhere"]) == ("b", True)
        assert attributes_of(recorder.named("block.schedule"))["block.instance"] == "a"

    run(test)


def test_responses_that_are_not_shown() -> None:
    """The spans end with the proxy's stream, without an outcome."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with picking(completes, tracer=recorder.tracer) as here:
            one = await placed(here, response_mode=NONE)
            await one.finish()
            await recorder.children(REQUEST)
        assert "error.type" not in attributes_of(recorder.named(REQUEST))
        assert "gen_ai.usage.output_tokens" not in attributes_of(recorder.named(REQUEST))

    run(test)
