"""What is answered to which message, by the proxy's mode."""

from __future__ import annotations

import json

import grpc
import pytest

from protos.envoy.v3 import external_processor_pb2 as wire
from tests.services.endpoint_picker.running import (
    BUFFERED,
    FULL_DUPLEX,
    NONE,
    STREAMED,
    Picking,
    Proxy,
    chosen,
    completion,
    head,
    header_map,
    picking,
    set_headers,
)
from tests.services.gateway.stubs import completes
from tests.services.waiting import run, until

MAX_CHUNK = 62_000  # bytes; some proxies take no more than 64 KiB in one message


def proxy(here: Picking, **options: object) -> Proxy:
    """Open a stream."""
    return Proxy(call=here.stub.Process(), **options)


async def body_back(one: Proxy) -> bytes:
    """Read the messages that send the request's body on."""
    pieces = []
    while True:
        message = await one.read()
        streamed = message.request_body.response.body_mutation.streamed_response
        assert len(streamed.body) <= MAX_CHUNK
        pieces.append(streamed.body)
        if streamed.end_of_stream:
            return b"".join(pieces)


@pytest.mark.parametrize("num_bytes", [10, MAX_CHUNK, 5 * 2**20])
def test_full_duplex_answers_when_the_body_is_whole(num_bytes: int) -> None:
    """First the headers with the endpoints, then the body as it came, in messages that every proxy takes."""

    async def test() -> None:
        async with picking(completes, completes) as here:
            here.sidecars[0].e2e_s = 9.0
            one = proxy(here)
            body = completion(prompt=num_bytes * "x")
            await one.send_headers(head())
            half = len(body) // 2
            await one.send_body(body[:half], end=False)
            await one.send_body(body[half:], end=False)
            await one.send_body(b"")
            first = await one.read()
            assert chosen(first) == here.endpoints[::-1]
            assert first.request_headers.response.clear_route_cache
            assert await body_back(one) == body
            await one.finish()

    run(test)


def test_without_a_configuration_a_proxy_streams_in_full_duplex() -> None:
    """Proxies that do not tell their mode show the body without waiting."""

    async def test() -> None:
        async with picking(completes) as here:
            call = here.stub.Process()
            await call.write(wire.ProcessingRequest(request_headers=wire.HttpHeaders(headers=header_map(head()))))
            one = Proxy(call=call)
            await one.send_body(completion())
            assert chosen(await one.read()) == here.endpoints
            assert await body_back(one) == completion()

    run(test)


def test_trailers_end_a_body() -> None:
    """The body is whole when trailers come, which are answered after it."""

    async def test() -> None:
        async with picking(completes) as here:
            one = proxy(here)
            await one.send_headers(head())
            await one.send_body(completion(), end=False)
            await one.call.write(wire.ProcessingRequest(request_trailers=wire.HttpTrailers()))
            assert chosen(await one.read()) == here.endpoints
            streamed = (await one.read()).request_body.response.body_mutation.streamed_response
            assert (streamed.body, streamed.end_of_stream) == (completion(), False)
            assert (await one.read()).WhichOneof("response") == "request_trailers"

    run(test)


def test_buffered_answers_headers_at_once_and_chooses_with_the_body() -> None:
    """The proxy waits for the answer to the headers; that to the body may change them."""

    async def test() -> None:
        async with picking(completes) as here:
            one = proxy(here, request_mode=BUFFERED, response_mode=BUFFERED)
            await one.send_headers(head(x_llm_d_model_name_rewrite="tiny", content_length="9"))
            answer = await one.read()
            assert answer.WhichOneof("response") == "request_headers"
            assert not answer.request_headers.HasField("response")
            await one.send_body(completion(model="nice name"))
            answer = await one.read()
            assert chosen(answer) == here.endpoints
            mutation = answer.request_body.response
            assert json.loads(mutation.body_mutation.body)["model"] == "tiny"
            assert set_headers(mutation.header_mutation)["content-length"] == str(len(mutation.body_mutation.body))
            await one.respond()
            await one.read()
            await one.respond_body(b'{"model": "tiny"}')
            answer = await one.read()
            assert answer.response_body.response.body_mutation.body == b'{"model": "nice name"}'
            await one.finish()

    run(test)


@pytest.mark.parametrize("mode", [NONE, STREAMED, wire.BODY_SEND_MODE_BUFFERED_PARTIAL])
def test_other_modes_choose_by_headers_alone(mode: int) -> None:
    """A completion is placed, with a prompt as long as its body says."""

    async def test() -> None:
        async with picking(completes, completes) as here:
            here.sidecars[0].e2e_s = 9.0
            one = proxy(here, request_mode=mode)
            await one.send_headers(head(content_length="4000"))
            assert chosen(await one.read())[0] == here.endpoints[1]
            (reserved,) = here.sidecars[1].held.values()
            assert reserved.request.prompt_tokens == 1000
            if mode != NONE:
                await one.send_body(completion())
                assert (await one.read()).request_body == wire.BodyResponse()
            assert here.metric("block_picker_picks_total", how="by_headers") == 1

    run(test)


@pytest.mark.parametrize("mode", [FULL_DUPLEX, BUFFERED, NONE])
def test_a_request_without_a_body_goes_to_any_endpoint(mode: int) -> None:
    """It reserves nothing."""

    async def test() -> None:
        async with picking(completes, completes) as here:
            one = proxy(here, request_mode=mode)
            await one.send_headers(head("/v1/models", "GET"), end=True)
            assert set(chosen(await one.read())) <= set(here.endpoints)
            assert not any(sidecar.held for sidecar in here.sidecars)
            await one.finish()

    run(test)


def test_a_path_that_is_no_completion_passes_its_body_unread() -> None:
    """A body of an unknown path is passed on to any endpoint."""

    async def test() -> None:
        async with picking(completes) as here:
            one = proxy(here)
            await one.send_headers(head("/v1/files"))
            await one.send_body(b"\x00\xff")
            assert chosen(await one.read()) == here.endpoints
            assert await body_back(one) == b"\x00\xff"
            assert here.metric("block_picker_picks_total", how="any") == 1

    run(test)


def test_a_body_of_an_empty_message_is_answered_too() -> None:
    """A proxy that announced a body, and shows an empty one, waits for it."""

    async def test() -> None:
        async with picking(completes) as here:
            one = proxy(here)
            await one.send_headers(head("/tokenize"))
            await one.send_body(b"")
            assert chosen(await one.read()) == here.endpoints
            assert await body_back(one) == b""

    run(test)


def test_a_proxy_that_only_observes_gets_no_answer() -> None:
    """Nothing is placed for it."""

    async def test() -> None:
        async with picking(completes) as here:
            one = proxy(here)
            await one.call.write(
                wire.ProcessingRequest(
                    request_headers=wire.HttpHeaders(headers=header_map(head())), observability_mode=True
                )
            )
            await one.finish()
            assert not here.sidecars[0].reserved_ids

    run(test)


def test_a_stream_that_breaks_the_protocol_ends_with_an_error() -> None:
    """The error names the message."""

    async def test() -> None:
        async with picking(completes) as here:
            one = proxy(here)
            await one.send_headers(head())
            await one.send_headers(head())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one.call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "request_headers" in str(caught.value.details())
            await until(lambda: len(here.running.service) == 0)

    run(test)
