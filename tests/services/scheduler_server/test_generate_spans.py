"""Spans of Generate: the call, its decisions and its legs, with the engine's own span below a leg."""

from __future__ import annotations

import asyncio
import re

import grpc
import pytest

from protos.block.v1 import scheduler_pb2
from tests.services.scheduler_server.running import Client, cluster, refused, run, scheduler, text_of
from tests.services.scheduler_server.test_generating_in_legs import POLICY, pools
from tests.services.stub_engines import StubEngine

pytest.importorskip("opentelemetry.sdk")

from tests.services.span_recorder import SAMPLED, SPAN, TRACE, UNSAMPLED, SpanRecorder, attributes_of, id_of

CALL = "text_completion m"


def traceparents(engine: StubEngine) -> list[str]:
    """The headers that an engine received."""
    return [value.decode() for head in engine.heads for value in re.findall(rb"traceparent: (\S+)", head)]


async def generate(client: Client, *metadata: tuple[str, str]) -> str:
    """Call Generate with metadata; the text of the answer."""
    request = client.request(max_tokens=9, output_tokens=None, session_id="mine")
    message = scheduler_pb2.GenerateRequest(request=request, prompt="Tell me")
    return text_of([event async for event in client.stub.Generate(message, metadata=metadata)])


def test_one_call_is_one_tree() -> None:
    """Below the client's span, with what was predicted, what happened, and the engine's parent."""

    async def test() -> None:
        recorder = SpanRecorder(share=0.0)  # the client's flag decides
        async with cluster(1, tracer=recorder.tracer) as (client, _, behind):
            assert await generate(client, ("traceparent", SAMPLED), ("tracestate", "vendor=1")) == "Once upon a time"
            assert await recorder.tree(CALL) == {CALL: {"block.schedule": {}, "block.serve": {}}}
        own, leg = recorder.named(CALL), recorder.named("block.serve")
        assert {f"{span.context.trace_id:032x}" for span in recorder.spans} == {TRACE}
        assert own.parent is not None
        assert f"{own.parent.span_id:016x}" == SPAN
        assert traceparents(behind[0]) == [f"00-{TRACE}-{id_of(leg)}-01"]
        assert b"tracestate: vendor=1" in behind[0].heads[0]
        assert (own.kind.name, leg.kind.name) == ("SERVER", "CLIENT")
        found = attributes_of(own)
        assert found["rpc.method"] == "block.v1.Scheduler/Generate"
        assert found["gen_ai.request.model"] == "m"
        assert found["gen_ai.conversation.id"] == "mine"
        assert found["gen_ai.usage.output_tokens"] == 3
        assert found["gen_ai.response.finish_reasons"] == ("length",)
        actual_ms = found["block.actual_e2e_ms"]
        assert found["block.e2e_error_ratio"] == pytest.approx((2000.0 - actual_ms) / actual_ms)
        decided = attributes_of(recorder.named("block.schedule"))
        assert (decided["block.policy"], decided["block.instance"], decided["block.candidates"]) == ("block", "a", 1)
        assert decided["block.predicted_e2e_ms"] == 2000.0
        assert attributes_of(leg)["block.instance"] == "a"
        assert attributes_of(leg)["block.output_tokens"] == 3

    run(test)


def test_an_answer_that_continues_has_a_leg_for_each_engine() -> None:
    """The first one has an error; the call has the counts of the whole answer."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with cluster(tracer=recorder.tracer) as (client, _, behind):
            behind[0].breaks_after, behind[1].pieces = 2, [" a time"]
            assert await generate(client) == "Once upon a time"
            children = await recorder.children(CALL)
        assert [span.name for span in children] == 2 * ["block.schedule", "block.serve"]
        first, second = children[1], children[3]
        assert first.status.status_code.name == "ERROR"
        assert [attributes_of(span)["block.output_tokens"] for span in (first, second)] == [2, 1]
        assert [traceparents(engine)[0].split("-")[2] for engine in behind] == [id_of(first), id_of(second)]
        own = recorder.named(CALL)
        assert own.status.status_code.name == "UNSET"
        assert attributes_of(own)["block.migrations"] == 1
        assert attributes_of(own)["gen_ai.usage.output_tokens"] == 3
        assert attributes_of(own)["gen_ai.response.finish_reasons"] == ("length",)

    run(test)


def test_both_legs_are_children() -> None:
    """The prefill leg has its result, the decode leg the time of the hand-over."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with (
            pools(3) as (stubs, behind),
            scheduler(stubs, policy=POLICY, tracer=recorder.tracer) as client,
        ):
            assert await generate(client) == "Once upon a time"
            children = await recorder.children(CALL)
        assert [span.name for span in children] == ["block.schedule", "block.prefill", "block.decode"]
        schedule, prefill, decode = map(attributes_of, children)
        assert (schedule["block.prefill_instance"], prefill["block.instance"], decode["block.instance"]) == (
            "a", "a", "c",
        )  # fmt: skip
        assert prefill["block.result"] == "held"
        assert decode["block.hand_over_ms"] > 0
        sent = [traceparents(engine)[0].split("-")[2] for engine in (behind[0], behind[2])]
        assert sent == [id_of(span) for span in children[1:]]

    run(test)


def test_what_is_not_sampled_has_no_span() -> None:
    """The engine gets the flag, with the client's own ids where there are any."""

    async def test() -> None:
        recorder = SpanRecorder(share=0.4)
        async with cluster(1, tracer=recorder.tracer) as (client, _, behind):
            await generate(client)
            await generate(client, ("traceparent", UNSAMPLED))
        assert recorder.spans == []
        sent = traceparents(behind[0])
        assert sent[0].endswith("-00")
        assert sent[1:] == [UNSAMPLED]

    run(test)


def test_without_a_tracer_the_callers_header_passes() -> None:
    """And none is made up."""

    async def test() -> None:
        async with cluster(1) as (client, _, behind):
            await generate(client, ("traceparent", SAMPLED))
            await generate(client)
            assert traceparents(behind[0]) == [SAMPLED]

    run(test)


def test_calls_that_fail() -> None:
    """The span has the status that the caller gets; that of a decision that fails, its error."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with cluster(tracer=recorder.tracer) as (client, _, behind):
            behind[0].status = behind[1].status = 500
            await refused(client.generate(), grpc.StatusCode.UNAVAILABLE)
            assert [span.name for span in await recorder.children(CALL)] == 2 * ["block.schedule", "block.serve"]
            assert attributes_of(recorder.named(CALL))["error.type"] == "UNAVAILABLE"
            recorder.exporter.clear()
            await refused(client.generate(policy="unheard-of"))
            (schedule,) = await recorder.children(CALL)
        assert attributes_of(schedule)["error.type"] == "ValueError"
        assert attributes_of(recorder.named(CALL))["error.type"] == "INVALID_ARGUMENT"

    run(test)


def test_a_cancelled_call() -> None:
    """All its spans end, with what the caller had received."""

    async def test() -> None:
        recorder = SpanRecorder()
        async with cluster(1, tracer=recorder.tracer) as (client, _, behind):
            behind[0].hold = asyncio.Event()
            request = client.request(max_tokens=9, output_tokens=None)
            call = client.stub.Generate(scheduler_pb2.GenerateRequest(request=request, prompt="Tell me"))
            await call.read()
            assert (await call.read()).chunk.text == "Once"
            call.cancel()
            await recorder.children(CALL)
        own = recorder.named(CALL)
        assert attributes_of(own)["error.type"] == "CANCELLED"
        assert attributes_of(own)["gen_ai.usage.output_tokens"] == 1
        assert attributes_of(recorder.named("block.serve"))["error.type"] == "CANCELLED"

    run(test)
