"""What the gateway measures of answers: by model, between tokens, by client, with traces as exemplars."""

from __future__ import annotations

import asyncio

import pytest

from services.http.sse import num_without_token
from tests.services.gateway.stubs import DONE, STREAM, Call, completes, event, scene, streams
from tests.services.waiting import run

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-"
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"total_tokens":9,"completion_tokens":6}}\n\n'


def body(**fields: object) -> dict[str, object]:
    """A request for a stream."""
    return {"model": "tiny", "prompt": "Say hello", "stream": True, **fields}


def test_times_between_tokens() -> None:
    """Each token after the first piece counts; [DONE] is none."""

    async def test() -> None:
        first_read = asyncio.Event()

        async def answer(call: Call) -> None:
            call.stream()
            await call.chunk(STREAM[0])
            await first_read.wait()
            await call.chunk(STREAM[1] + STREAM[2] + DONE)
            call.end()

        async with scene(answer) as here:
            async with here.client.stream("POST", "/v1/completions", json=body()) as reply:
                pieces = reply.aiter_bytes()
                await anext(pieces)
                first_read.set()
                async for _ in pieces:
                    pass
            await here.scheduler.released.get()
            assert await here.metric('block_gateway_inter_token_seconds_count{model="tiny"}') == 2
            gaps_s = await here.metric('block_gateway_inter_token_seconds_sum{model="tiny"}')
            assert await here.metric('block_gateway_tpot_seconds_count{model="tiny"}') == 1
            assert gaps_s == pytest.approx(2 * await here.metric("block_gateway_tpot_seconds_sum"), rel=0.5)

    run(test)


def test_answers_by_model_and_ending() -> None:
    """Tokens and endings are those of the model; an answer in one piece has no time to first token."""

    async def answer(call: Call) -> None:
        await (streams if b'"stream":true' in call.body else completes)(call)

    async def test() -> None:
        async with scene(answer) as here:
            for stream in (True, False):
                assert (await here.client.post("/v1/completions", json=body(stream=stream))).status_code == 200
                await here.scheduler.released.get()
            assert await here.metric('block_gateway_finished_total{model="tiny",reason="length"}') == 1
            assert await here.metric('block_gateway_finished_total{model="tiny",reason="stop"}') == 1
            assert await here.metric('block_gateway_output_tokens_total{model="tiny"}') == 6
            assert await here.metric('block_gateway_e2e_seconds_count{model="tiny"}') == 2
            assert await here.metric('block_gateway_ttft_seconds_count{model="tiny"}') == 1

    run(test)


def test_a_broken_stream_has_no_latency() -> None:
    """Its tokens and its failure count; its end says nothing about latency."""

    async def dies(call: Call) -> None:
        call.stream()
        await call.chunk(STREAM[0])
        call.die()

    async def test() -> None:
        async with scene(dies) as here:
            await here.client.post("/v1/completions", json=body())
            await here.scheduler.released.get()
            assert await here.metric('block_gateway_finished_total{model="tiny",reason="failed"}') == 1
            assert await here.metric('block_gateway_e2e_seconds_count{model="tiny"}') == 0

    run(test)


def test_attainment_by_client_and_tpot_target() -> None:
    """Each client and each TPOT target counts by itself; a request without targets does not count."""

    async def test() -> None:
        async with scene(streams) as here:
            for client, slo in (("acme", {"x-slo-tpot-ms": "600000"}), ("acme", {"x-slo-ttft-ms": "0.001"}), ("b", {})):
                headers = {"x-llm-d-inference-fairness-id": client, **slo}
                await here.client.post("/v1/completions", json=body(), headers=headers)
            assert await here.metric('block_gateway_slo_requests_total{client="acme",tpot_slo="600"}') == 1
            assert await here.metric('block_gateway_slo_attained_total{client="acme",tpot_slo="600"}') == 1
            assert await here.metric('block_gateway_slo_requests_total{client="acme",tpot_slo=""}') == 1
            assert await here.metric('block_gateway_slo_attained_total{client="acme",tpot_slo=""}') == 0
            assert await here.metric("block_gateway_slo_requests_total") == 2

    run(test)


def test_exemplars_name_traces() -> None:
    """Prometheus asks for OpenMetrics and gets the trace of a request that one records."""

    async def test() -> None:
        async with scene(streams) as here:
            for flags in ("00", "01"):
                await here.client.post("/v1/completions", json=body(), headers={"traceparent": PARENT + flags})
                await here.scheduler.released.get()
            reply = await here.client.get("/metrics", headers=OPENMETRICS)
            assert reply.headers["content-type"].startswith("application/openmetrics-text")
            lines = [line for line in reply.text.splitlines() if "trace_id" in line]
            assert len(lines) == 3  # of TTFT, TPOT and e2e
            assert all(f'# {{trace_id="{TRACE}"}}' in line for line in lines)
            assert "trace_id" not in (await here.client.get("/metrics")).text

    run(test)


@pytest.mark.parametrize(
    ("events", "expected"),
    [(event("a"), 0), (event("a") + DONE, 1), (USAGE, 1), (event("a") + USAGE + DONE, 2), (event("[DONE]"), 0)],
)
def test_events_without_a_token(events: bytes, expected: int) -> None:
    """The usage and the end of a stream."""
    assert num_without_token(events) == expected
