"""Calls over one stream: bounds, and streams that stop or end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.placement import pipelined_call
from services.placement.pipelined_call import MAX_WAITING, PREDICTOR, PipelinedCall
from services.rpc.channels import make_server
from services.rpc.grpc_channel import GrpcChannel
from tests.services.waiting import run


class Sidecar:
    """Replies to a message with itself, and to `hang`, `end` and `drop` by what they say."""

    def __init__(self) -> None:
        self.num_streams = self.num_calls = 0

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Reply to each message in order."""
        self.num_streams += 1
        async for request in requests:
            if request == b"hang":
                await asyncio.Event().wait()
            elif request == b"drop":
                await context.abort(grpc.StatusCode.INTERNAL, "dropped")
            elif request == b"end":
                return
            elif request == b"twice":
                yield request
            yield request

    async def unary(self, request: bytes, _context: Any) -> bytes:
        """Reply."""
        self.num_calls += 1
        return b"alone " + request


@asynccontextmanager
async def called(*, with_stream: bool = True, deadline_s: float = 20.0) -> AsyncIterator[tuple[Sidecar, PipelinedCall]]:
    """A pipelined call of a running sidecar."""
    sidecar, server = Sidecar(), make_server(max_message_bytes=2**20)
    handlers: dict[str, Any] = {"Predict": grpc.unary_unary_rpc_method_handler(sidecar.unary)}
    if with_stream:
        handlers["PredictStream"] = grpc.stream_stream_rpc_method_handler(sidecar.stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PREDICTOR, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with GrpcChannel(f"127.0.0.1:{port}") as channel:
        call = PipelinedCall(channel, "Predict", deadline_s)
        yield sidecar, call
        await call.close()
    await server.stop(None)


def test_replies_are_matched_in_order_over_one_stream() -> None:
    """However many requests wait."""

    async def test() -> None:
        async with called() as (sidecar, call):
            requests = [str(number).encode() for number in range(500)]
            assert await asyncio.gather(*map(call.send, requests)) == requests
            assert (sidecar.num_streams, sidecar.num_calls) == (1, 0)

    run(test)


@pytest.mark.parametrize("end", [b"end", b"drop"])
def test_a_stream_that_ends_is_opened_again(end: bytes) -> None:
    """What had no reply is called alone, once, and the next request opens another stream."""

    async def test() -> None:
        async with called() as (sidecar, call):
            replies = [call.send(request) for request in (b"a", end, b"b")]
            assert await asyncio.gather(*replies) == [b"a", b"alone " + end, b"alone b"]
            assert await call.send(b"c") == b"c"
            assert (sidecar.num_streams, sidecar.num_calls) == (2, 2)

    run(test)


def test_a_server_without_streams_is_called_alone() -> None:
    """After one attempt."""

    async def test() -> None:
        async with called(with_stream=False) as (sidecar, call):
            assert await call.send(b"a") == b"alone a"
            assert await call.send(b"b") == b"alone b"
            assert (sidecar.num_streams, sidecar.num_calls) == (0, 2)

    run(test)


def test_a_reply_without_a_request_ends_the_stream() -> None:
    """It cannot be known which replies are right any more."""

    async def test() -> None:
        async with called() as (sidecar, call):
            assert await call.send(b"twice") == b"twice"
            while call._stream is not None:
                await asyncio.sleep(0.01)
            assert await call.send(b"a") == b"a"
            assert sidecar.num_streams == 2

    run(test)


def test_a_stream_that_no_longer_replies_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request after a while opens another one; those that waited fail."""
    monkeypatch.setattr(pipelined_call, "MIN_STALLED_S", 0.1)

    async def test() -> None:
        async with called(deadline_s=0.01) as (sidecar, call):
            assert await call.send(b"a") == b"a"
            waiting = [call.send(b"hang"), call.send(b"b")]
            await asyncio.sleep(0.2)
            assert not any(reply.done() for reply in waiting)
            assert await call.send(b"c") == b"c"
            for reply in waiting:
                with pytest.raises(ConnectionError, match="cancelled"):
                    await reply
            assert sidecar.num_streams == 2

    run(test)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more request than that fails at once."""
    monkeypatch.setattr(pipelined_call, "MIN_STALLED_S", 1000.0)  # however long a busy machine takes to send them all

    async def test() -> None:
        async with called(deadline_s=0.1) as (_, call):
            waiting = [call.send(b"hang") for _ in range(MAX_WAITING)]
            with pytest.raises(ConnectionError, match="wait for a reply"):
                await call.send(b"a")
            assert not any(reply.done() for reply in waiting)

    run(test)


def test_a_closed_one_accepts_nothing() -> None:
    """What is in flight has its deadline, and later requests fail at once."""

    async def test() -> None:
        async with called(deadline_s=0.05) as (_, call):
            waiting = call.send(b"hang")
            await call.close()
            with pytest.raises(ConnectionError, match="cancelled"):
                await waiting
            with pytest.raises(ConnectionError, match="removed"):
                await call.send(b"a")

    run(test)
