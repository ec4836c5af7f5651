"""What is read of responses: outcomes, errors, other endpoints, clients that leave."""

from __future__ import annotations

import asyncio
import itertools
import json
import tracemalloc

import grpc
import pytest

from protos.block.v1 import common_pb2
from protos.envoy.v3 import external_processor_pb2 as wire
from services.endpoint_picker.exchange import Exchange
from tests.services.endpoint_picker.running import (
    MODEL,
    NONE,
    Picking,
    Proxy,
    chosen,
    completion,
    head,
    header_map,
    picking,
    set_headers,
)
from tests.services.gateway.stubs import DONE, completes, event
from tests.services.waiting import run, until

STREAM = "text/event-stream; charset=utf-8"
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
CANCELLED, FAILED = common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_FAILED
WHOLE = b'{"choices": [{"text": "Hi", "finish_reason": "stop"}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'


async def placed(
    here: Picking, headers: dict[str, str] | None = None, body: bytes | None = None, **options: object
) -> Proxy:
    """Open a stream, show a request, and read the answer."""
    one = Proxy(call=here.stub.Process(), **options)
    await one.send_headers(headers or head())
    await one.send_body(completion() if body is None else body)
    while True:
        message = await one.read()
        if message.request_body.response.body_mutation.streamed_response.end_of_stream:
            return one


def test_a_stream_passes_untouched_and_its_outcome_is_reported() -> None:
    """Each part is answered at once with the same bytes, however the events are cut."""

    async def test() -> None:
        async with picking(completes) as here:
            one = await placed(here)
            await one.respond(kind=STREAM)
            await one.read()
            whole = event("Hello") + event(" world") + event("!", "length") + DONE
            cuts = [0, 5, len(event("Hello")) + 3, len(whole)]
            for start, end in itertools.pairwise(cuts):
                await one.respond_body(whole[start:end], end=False)
                streamed = (await one.read()).response_body.response.body_mutation.streamed_response
                assert (streamed.body, streamed.end_of_stream) == (whole[start:end], False)
            await one.respond_body(b"")
            assert (await one.read()).response_body.response.body_mutation.streamed_response.end_of_stream
            await until(lambda: bool(here.sidecars[0].outcomes))
            (outcome,) = here.sidecars[0].outcomes
            assert (outcome.finish_reason, outcome.output_tokens) == (LENGTH, 3)
            assert 0 < outcome.ttft_s <= outcome.e2e_s
            assert outcome.forecast.e2e_s == 2.0
            assert not here.sidecars[0].held
            await one.finish()
            assert len(here.sidecars[0].outcomes) == 1
            assert here.metric("block_picker_output_tokens_total") == 3

    run(test)


def test_a_response_in_one_piece() -> None:
    """Its usage has the counts; the headers tell the decision."""

    async def test() -> None:
        async with picking(completes) as here:
            one = await placed(here)
            await one.respond()
            told = set_headers((await one.read()).response_headers.response.header_mutation)
            assert told["x-block-instance"] == "a"
            assert told["x-block-predicted-e2e-ms"] == "2000.0"
            await one.respond_body(WHOLE)
            await one.read()
            await until(lambda: bool(here.sidecars[0].outcomes))
            (outcome,) = here.sidecars[0].outcomes
            assert (outcome.finish_reason, outcome.prompt_tokens, outcome.output_tokens) == (STOP, 7, 3)
            assert not outcome.HasField("ttft_s")

    run(test)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_engine_that_fails_is_avoided(status: int) -> None:
    """The reservation ends with the headers; after two failures the instance gets no more requests."""

    async def test() -> None:
        async with picking(completes, completes) as here:
            here.sidecars[1].e2e_s = 9.0
            for number in (1, 2):
                one = await placed(here)
                assert chosen(one.received[0])[0] == here.endpoints[0]
                await one.respond(status)
                await one.read()
                await until(lambda number=number: len(here.sidecars[0].outcomes) == number)
                assert here.sidecars[0].outcomes[-1].finish_reason == FAILED
                assert not here.sidecars[0].held
                await one.finish()
            one = await placed(here)
            assert chosen(one.received[0])[0] == here.endpoints[1]
            assert here.metric("block_picker_responses_total", status=str(status)) == 2

    run(test)


def test_a_client_that_leaves_releases_its_request() -> None:
    """Whether the proxy cancels the stream or closes it, before a response or within one."""

    async def test() -> None:
        async with picking(completes) as here:
            ends = [lambda one: one.call.cancel(), lambda one: one.call.done_writing()]
            for number, end in enumerate([*ends, *ends], 1):
                one = await placed(here)
                if number > 2:
                    await one.respond(kind=STREAM)
                    await one.respond_body(event("Hel"), end=False)
                    await one.read()
                    await one.read()
                ending = end(one)
                if not isinstance(ending, bool):
                    await ending
                await until(lambda number=number: len(here.sidecars[0].outcomes) == number)
                assert here.sidecars[0].outcomes[-1].finish_reason == CANCELLED
                assert not here.sidecars[0].held
            assert here.metric("block_picker_clients_left_total") == 4
            await until(lambda: here.metric("block_picker_requests_under_way") == 0)

    run(test)


def test_a_client_that_leaves_before_the_decision_leaves_nothing_behind() -> None:
    """The decision is cancelled, with the reservation that it may have made."""

    async def test() -> None:
        async with picking(completes) as here:
            here.sidecars[0].hung_reserving = asyncio.Event()
            one = Proxy(call=here.stub.Process())
            await one.send_headers(head(x_request_id="mine"))
            await one.send_body(completion())
            await until(lambda: bool(here.sidecars[0].questions))
            one.call.cancel()
            await until(lambda: len(here.running.service) == 0)
            here.sidecars[0].hung_reserving.set()
            await until(lambda: not here.sidecars[0].held)
            again = await placed(here, head(x_request_id="mine"))
            assert "x-request-id" not in set_headers(again.received[0].request_headers.response.header_mutation)

    run(test)


def test_the_endpoint_that_served_gets_the_outcome() -> None:
    """Where the proxy had to take a further endpoint, the first one loses the reservation and counts as failed."""

    async def test() -> None:
        async with picking(completes, completes) as here:
            here.sidecars[1].e2e_s = 9.0
            one = await placed(here)
            first, second = chosen(one.received[0])
            await one.respond(served=second)
            await one.read()
            await until(lambda: bool(here.sidecars[0].outcomes))
            assert first == here.endpoints[0]
            assert here.sidecars[0].outcomes[0].finish_reason == FAILED
            assert not here.sidecars[0].held
            await one.respond_body(WHOLE)
            await one.read()
            await until(lambda: bool(here.sidecars[1].outcomes))
            assert here.sidecars[1].outcomes[0].output_tokens == 3
            assert here.metric("block_picker_served_elsewhere_total", endpoint="retried") == 1

    run(test)


def test_an_endpoint_that_is_not_known_served() -> None:
    """The reservation ends; there is nobody to report the outcome to."""

    async def test() -> None:
        async with picking(completes) as here:
            one = await placed(here)
            await one.respond(served="10.9.9.9:1")
            await one.read()
            await one.respond_body(WHOLE)
            await one.read()
            await one.finish()
            await until(lambda: not here.sidecars[0].held)
            assert len(here.sidecars[0].outcomes) == 1
            assert here.metric("block_picker_served_elsewhere_total", endpoint="unknown") == 1

    run(test)


def test_responses_that_are_not_shown() -> None:
    """The status ends the reservation at the end of the stream; without it, the engine or time does."""

    async def test() -> None:
        async with picking(completes) as here:
            one = await placed(here, response_mode=NONE)
            await one.respond()
            await one.read()
            await one.finish()
            await until(lambda: bool(here.sidecars[0].outcomes))
            assert here.sidecars[0].outcomes[0].finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
            one = await placed(here, response_mode=NONE)
            await one.finish()
            await until(lambda: len(here.running.service) == 0)
            assert len(here.sidecars[0].held) == 1

    run(test)


def test_legs_go_to_two_instances() -> None:
    """The prefill instance is in a header, and its leg ends when the response begins."""

    async def test() -> None:
        roles = ("prefill", "decode", "decode")
        async with picking(completes, completes, completes, roles=roles, policy="pd_dynamo") as here:
            here.sidecars[2].e2e_s = 9.0
            one = await placed(here)
            prefill, *decode = here.endpoints
            assert set(chosen(one.received[0])) == set(decode)
            told = set_headers(one.received[0].request_headers.response.header_mutation)
            assert told["x-prefiller-host-port"] == prefill
            assert here.sidecars[0].held
            await one.respond(kind=STREAM)
            headers = set_headers((await one.read()).response_headers.response.header_mutation)
            assert headers["x-block-prefill-instance"] == "a"
            await until(lambda: not here.sidecars[0].held)
            await one.respond_body(event("Hi", "stop") + DONE)
            await one.read()
            await until(lambda: not any(sidecar.held for sidecar in here.sidecars))

    run(test)


def test_a_stream_that_breaks_the_protocol_is_counted() -> None:
    """As a fault of the proxy; others go on."""

    async def test() -> None:
        async with picking(completes) as here:
            one = Proxy(call=here.stub.Process())
            await one.call.write(wire.ProcessingRequest())
            await until(lambda: here.metric("block_picker_stream_errors_total", why="protocol") == 1)
            assert await one.call.code() is grpc.StatusCode.INVALID_ARGUMENT
            await placed(here)

    run(test)


def test_no_body_is_kept_while_the_response_is_awaited() -> None:
    """Thousands of responses can be under way, each for minutes."""

    async def test() -> None:
        async with picking(completes) as one:
            headers = wire.HttpHeaders(headers=header_map(head("/v1/chat/completions")))
            whole = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": 4_000_000 * "x"}]}).encode()
            body = wire.HttpBody(body=whole, end_of_stream=True)
            exchange = Exchange(one.running.picker)
            tracemalloc.start()
            try:
                assert exchange.receive(wire.ProcessingRequest(request_headers=headers)) == []
                assert exchange.receive(wire.ProcessingRequest(request_body=body)) is None
                assert sum(response.ByteSize() for response in await exchange.place()) > 4_000_000
                num_bytes, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
                exchange.close()
            assert num_bytes < 1_000_000

    run(test)


def test_other_endpoints_are_placed_and_read_as_well() -> None:
    """A message is forecast as a chat, embeddings by their prompts; errors have the shape of their API."""
    message = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
    events = (
        b'event: message_start\ndata: {"message":{"usage":{"input_tokens":0,"output_tokens":0}}}\n\n'
        b'event: content_block_delta\ndata: {"delta":{"text":"a"}}\n\n'
        b'event: message_delta\ndata: {"delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":5,"output_tokens":1}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )

    async def test() -> None:
        async with picking(completes) as here:
            sidecar = here.sidecars[0]
            one = await placed(here, head("/v1/messages"), json.dumps(message).encode())
            assert [held.request.max_tokens for held in sidecar.held.values()] == [9]
            await one.respond(kind=STREAM)
            await one.read()
            await one.respond_body(events)
            await one.read()
            await until(lambda: len(sidecar.outcomes) == 1)
            outcome = sidecar.outcomes[0]
            assert (outcome.finish_reason, outcome.prompt_tokens, outcome.output_tokens) == (STOP, 5, 1)
            inputs = json.dumps({"model": MODEL, "input": ["a", "b"]}).encode()
            one = await placed(here, head("/v1/embeddings"), inputs)
            (held,) = sidecar.held.values()
            assert (held.request.output_tokens, held.request.num_prompts) == (1, 2)
            await one.respond()
            await one.read()
            await one.respond_body(b'{"data": [], "usage": {"prompt_tokens": 2}}')
            await one.read()
            await until(lambda: len(sidecar.outcomes) == 2)
            assert (sidecar.outcomes[1].finish_reason, sidecar.outcomes[1].prompt_tokens) == (STOP, 2)
            one = Proxy(call=here.stub.Process())
            await one.send_headers(head("/v1/messages"))
            await one.send_body(b'{"messages": []}')
            refused = json.loads((await one.read()).immediate_response.body)
            assert (refused["type"], refused["error"]["type"]) == ("error", "invalid_request_error")

    run(test)
