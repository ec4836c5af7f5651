"""The gRPC client beside grpc.aio: the same server, the same calls, the same replies and statuses."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from protos.block.v1 import predictor_pb2
from services.rpc import grpc_channel
from services.rpc.channels import make_server
from services.rpc.grpc_call import MAX_MESSAGE_BYTES
from services.rpc.grpc_channel import GrpcChannel
from services.rpc.http2 import Http2Connection
from tests.services.waiting import PATIENCE_S, bound, run, until

STATUS = {code.name: code for code in grpc.StatusCode}
SERVICE = "block.test.Script"
HOST = "127.0.0.1"
DEADLINE_S = 1.0  # of calls that exceed it: a busy server begins them in time


METADATA = (("x-block-shed-reason", "late"), ("x-a", "1"), ("x-a", "2"), ("x-raw-bin", b"\0"))


@dataclass(eq=False)
class Script:
    """A service that does what its requests say."""

    cancelled: int = 0
    deadlines: list[float | None] = field(default_factory=list)

    async def once(self, request: bytes, context: Any) -> bytes:
        """Return or fail: `sizes;code;details;seconds`."""
        self.deadlines.append(context.time_remaining())
        sizes, code, details, pause_s = parsed(request)
        try:
            await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details, trailing_metadata=METADATA)
        return bytes(sizes[0])

    async def each(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Return as many messages for each request."""
        try:
            async for request in requests:
                sizes, code, details, pause_s = parsed(request)
                await asyncio.sleep(pause_s)
                for size in sizes:
                    yield bytes([size % 251]) * size
                if code is not grpc.StatusCode.OK:
                    await context.abort(code, details)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def handler(self) -> grpc.GenericRpcHandler:
        """Return both methods as grpc has them."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Once": grpc.unary_unary_rpc_method_handler(self.once),
                "Each": grpc.stream_stream_rpc_method_handler(self.each),
            },
        )


def request(*sizes: int, code: str = "OK", details: str = "", pause_s: float = 0.0) -> bytes:
    """Write what the server is to do."""
    return ";".join((",".join(map(str, sizes)), code, details.encode().hex(), str(pause_s))).encode()


def parsed(raw: bytes) -> tuple[list[int], grpc.StatusCode, str, float]:
    """Read it."""
    sizes, code, details, pause_s = raw.decode().split(";")
    return (
        [int(one) for one in sizes.split(",") if one],
        STATUS[code],
        bytes.fromhex(details).decode(),
        float(pause_s),
    )


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[tuple[Script, int, grpc.aio.Server]]:
    """A running service."""
    script, server = Script(), make_server(max_message_bytes=2**26)
    server.add_generic_rpc_handlers((script.handler(),))
    port = await bound(lambda: server.add_insecure_port(f"{HOST}:{port}"))
    await server.start()
    try:
        yield script, port, server
    finally:
        await server.stop(None)


async def once(channel: GrpcChannel, raw: bytes, timeout_s: float = PATIENCE_S) -> bytes:
    """Make a unary call."""
    return await channel.unary(f"/{SERVICE}/Once", raw, timeout_s=timeout_s)


async def code_of(call: Any) -> tuple[str, str]:
    """The status that a call fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details() or ""


class Each:
    """A stream, and what has come of it."""

    def __init__(self, channel: GrpcChannel, method: str = "Each", timeout_s: float | None = None) -> None:
        self.messages: list[bytes] = []
        self.ends: list[Exception | None] = []
        self.ended = asyncio.Event()
        self.call = channel.start_call(f"/{SERVICE}/{method}", self.messages.append, self._end, timeout_s=timeout_s)

    def _end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.ended.set()

    async def status(self) -> tuple[str, str]:
        """The status that it ended with."""
        await asyncio.wait_for(self.ended.wait(), PATIENCE_S)
        (error,) = self.ends
        if error is None:
            return "OK", ""
        assert isinstance(error, grpc.aio.AioRpcError)
        return error.code().name, error.details() or ""


details = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
codes = st.sampled_from([code.name for code in grpc.StatusCode])
steps = st.lists(
    st.tuples(st.lists(st.sampled_from([0, 1, 300, 20_000, 100_000]), max_size=4), codes | st.just("OK"), details),
    min_size=1,
    max_size=6,
)


Seen = tuple[list[int], str, str]  # the sizes of the messages, and the status


async def by_grpc(call: Any) -> Seen:
    """What grpc.aio sees of a call."""
    sizes = []
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            return [len(await call)], "OK", ""
        async for message in call:
            sizes.append(size_of(message))  # noqa: PERF401 - those before an error count
    except grpc.aio.AioRpcError as error:
        return sizes, error.code().name, error.details() or ""
    return sizes, "OK", ""


async def by_ours(call: Each) -> Seen:
    """What ours sees of a stream."""
    code, text = await call.status()
    return [size_of(message) for message in call.messages], code, text


async def by_ours_alone(channel: GrpcChannel, raw: bytes) -> Seen:
    """What ours sees of a unary call."""
    try:
        return [len(await once(channel, raw))], "OK", ""
    except grpc.aio.AioRpcError as error:
        return [], error.code().name, error.details() or ""


def size_of(message: bytes) -> int:
    """The size of a message, if its content is right."""
    assert message == bytes([len(message) % 251]) * len(message)
    return len(message)


def as_scripted(script: list[tuple[list[int], str, str]]) -> Seen:
    """What the server sends by a script, up to its first error."""
    sent: list[int] = []
    for sizes, code, text in script:
        sent += sizes
        if code != "OK":
            return sent, code, text
    return sent, "OK", ""


def same(ours: Seen, theirs: Seen, scripted: Seen) -> None:
    """Compare; grpc.aio sometimes loses the status of a stream that ends in an error."""
    assert ours == (scripted if theirs[1:] == ("INTERNAL", "Internal error from Core") else theirs)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=1, max_size=3))
@example([[([300], "OK", ""), ([], "INTERNAL", "50 % of 'ä' \n is\ttoo much €")]])
def test_streams_and_calls_are_those_of_grpc(streams: list[list[tuple[list[int], str, str]]]) -> None:
    """Several streams at once, and each of their requests as a call of its own."""
    scripts = [[request(*sizes, code=code, details=text) for sizes, code, text in script] for script in streams]

    async def test() -> None:
        async with (
            serving() as (_, port, _server),
            GrpcChannel(f"{HOST}:{port}") as ours,
            grpc.aio.insecure_channel(f"{HOST}:{port}") as theirs,
        ):
            started = []
            for script in scripts:
                stream = Each(ours)
                for number, raw in enumerate(script, 1):
                    stream.call.send(raw, last=number == len(script))
                started.append((stream, theirs.stream_stream(f"/{SERVICE}/Each")(iter(script))))
            for script, (stream, call) in zip(streams, started, strict=True):
                same(await by_ours(stream), await by_grpc(call), as_scripted(script))
            for sizes, code, text in (step for script in streams for step in script):
                raw, scripted = request(0, *sizes, code=code, details=text), ([0], "OK", "")
                if code != "OK":
                    scripted = ([], code, text)
                same(
                    await by_ours_alone(ours, raw), await by_grpc(theirs.unary_unary(f"/{SERVICE}/Once")(raw)), scripted
                )

    run(test)


def test_messages_are_written_and_read() -> None:
    """A reply of another type is an INTERNAL error."""

    async def reply(request: predictor_pb2.PredictRequest, _context: Any) -> bytes:
        return predictor_pb2.PredictResponse(instance_id=request.instance_id).SerializeToString() or b"\xff"

    async def test() -> None:
        server = make_server(max_message_bytes=2**20)
        handler = grpc.unary_unary_rpc_method_handler(reply, predictor_pb2.PredictRequest.FromString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Predict": handler}),))
        port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        async with GrpcChannel(f"{HOST}:{port}") as channel:
            for name in ("a", ""):
                call = channel.call(
                    f"/{SERVICE}/Predict",
                    predictor_pb2.PredictRequest(instance_id=name),
                    predictor_pb2.PredictResponse,
                    timeout_s=PATIENCE_S,
                )
                if name:
                    assert (await call).instance_id == name
                else:
                    assert await code_of(call) == ("INTERNAL", "the reply is no PredictResponse")
        await server.stop(None)

    run(test)


def test_an_unknown_method() -> None:
    """UNIMPLEMENTED, for calls and for streams."""

    async def test() -> None:
        async with serving() as (_, port, _server), GrpcChannel(f"{HOST}:{port}") as channel:
            assert (await code_of(channel.unary(f"/{SERVICE}/No", b"", timeout_s=PATIENCE_S)))[0] == "UNIMPLEMENTED"
            stream = Each(channel, "No")
            stream.call.send(b"x")
            assert (await stream.status())[0] == "UNIMPLEMENTED"

    run(test)


def test_trailing_metadata_of_an_error() -> None:
    """An error has the texts among them, in their order, as in grpc.aio; bytes are left out."""

    async def test() -> None:
        async with serving() as (_, port, _), GrpcChannel(f"{HOST}:{port}") as channel:
            failing = request(1, code="RESOURCE_EXHAUSTED", details="no")
            with pytest.raises(grpc.aio.AioRpcError) as ours:
                await once(channel, failing)
            async with grpc.aio.insecure_channel(f"{HOST}:{port}") as other:
                with pytest.raises(grpc.aio.AioRpcError) as theirs:
                    await other.unary_unary(f"/{SERVICE}/Once")(failing)
            texts = [pair for pair in theirs.value.trailing_metadata() or () if isinstance(pair[1], str)]
            assert list(ours.value.trailing_metadata() or ()) == texts == list(METADATA[:3])

    run(test)


def test_deadlines() -> None:
    """The client ends a call at its deadline, and the server knows of it."""

    async def test() -> None:
        async with serving() as (script, port, _server), GrpcChannel(f"{HOST}:{port}") as channel:
            assert await once(channel, request(1)) == bytes(1)  # the connection is there
            assert (await code_of(once(channel, request(1, pause_s=600), DEADLINE_S)))[0] == "DEADLINE_EXCEEDED"
            assert 0 <= (script.deadlines[1] or 0) <= 1.01 * DEADLINE_S
            await until(lambda: script.cancelled == 1)
            stream = Each(channel, timeout_s=DEADLINE_S)
            stream.call.send(request(1, pause_s=600))
            assert (await stream.status())[0] == "DEADLINE_EXCEEDED"
            await until(lambda: script.cancelled == 2)
            assert await once(channel, request(2)) == bytes(2)

    run(test)


def test_cancelled_calls() -> None:
    """A call that nobody waits for any more is cancelled at the server, and `on_end` is not called."""

    async def test() -> None:
        async with serving() as (script, port, _server), GrpcChannel(f"{HOST}:{port}") as channel:
            waiting = asyncio.create_task(once(channel, request(1, pause_s=600), PATIENCE_S))
            await until(lambda: len(script.deadlines) == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            stream = Each(channel)
            stream.call.send(request(1))
            stream.call.send(request(1, pause_s=600))
            await until(lambda: stream.messages == [b"\x01"])
            stream.call.cancel()
            stream.call.send(b"ignored")
            await until(lambda: script.cancelled == 2)
            assert stream.ends == []

    run(test)


def test_an_error_of_the_caller_ends_its_call_only() -> None:
    """What `on_message` raises is what the call ends with."""

    async def test() -> None:
        async with serving() as (_, port, _server), GrpcChannel(f"{HOST}:{port}") as channel:

            def refuse(_: bytes) -> None:
                raise ValueError("not this one")

            other = Each(channel)
            with pytest.raises(ValueError, match="not this one"):
                await channel.follow(f"/{SERVICE}/Each", request(1, 2, pause_s=0.01), refuse)
            other.call.send(request(4))
            await until(lambda: other.messages == [bytes([4]) * 4])
            assert (await code_of(channel.follow(f"/{SERVICE}/Each", request(code="ABORTED"), print)))[0] == "ABORTED"
            seen: list[bytes] = []
            await channel.follow(f"/{SERVICE}/Each", request(1, 2), seen.append)
            assert seen == [b"\x01", b"\x02\x02"]

    run(test)


def test_sizes_of_messages() -> None:
    """Up to 4 MiB come back, and more is refused; what is sent may be larger."""

    async def test() -> None:
        async with serving() as (_, port, _server), GrpcChannel(f"{HOST}:{port}") as channel:
            assert len(await once(channel, request(MAX_MESSAGE_BYTES))) == MAX_MESSAGE_BYTES
            code, text = await code_of(once(channel, request(MAX_MESSAGE_BYTES + 1)))
            assert (code, "at most" in text) == ("RESOURCE_EXHAUSTED", True)
            large = request(5) + b"0" * 6_000_000  # a number with many zeros
            assert await once(channel, large) == bytes(5)

    run(test)


def test_many_calls_at_once() -> None:
    """Calls before the first connection wait for it, and a thousand share it."""

    async def test() -> None:
        async with serving() as (_, port, _server), GrpcChannel(f"{HOST}:{port}") as channel:
            replies = await asyncio.gather(*(once(channel, request(size)) for size in range(900)))
            assert [len(one) for one in replies] == list(range(900))
            assert not channel._calls

    run(test)


def test_a_server_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call waits for the attempt, the next fail at once, and the channel connects by itself when it can."""
    monkeypatch.setattr(grpc_channel, "FIRST_PAUSE_S", 0.02)

    async def test() -> None:
        async with serving() as (_, port, _server):
            pass
        async with GrpcChannel(f"{HOST}:{port}") as channel:
            assert channel.get_state() is grpc.ChannelConnectivity.IDLE
            for _ in range(2):
                code, text = await code_of(once(channel, request(1)))
                assert (code, "cannot be reached" in text) == ("UNAVAILABLE", True)
            assert channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
            async with serving(port) as (_, again, _server):
                assert again == port
                await until(lambda: channel.get_state() is grpc.ChannelConnectivity.READY)
                assert await once(channel, request(1)) == bytes(1)

    run(test)


@pytest.mark.parametrize("grace_s", [None, PATIENCE_S])
def test_a_server_that_stops(grace_s: float | None) -> None:
    """Calls in flight end with UNAVAILABLE, or are finished within its grace; then the channel finds its successor."""

    async def test() -> None:
        async with serving() as (script, port, server), GrpcChannel(f"{HOST}:{port}") as channel:
            waiting = asyncio.create_task(once(channel, request(7, pause_s=0.2 if grace_s else 600)))
            await until(lambda: len(script.deadlines) == 1)
            await server.stop(grace_s)
            if grace_s:
                assert await waiting == bytes(7)
            else:
                assert (await code_of(waiting))[0] in ("UNAVAILABLE", "CANCELLED")
            await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
            async with serving(port) as (_, again, _server):
                assert again == port
                await until(lambda: channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY)
                assert await once(channel, request(3)) == bytes(3)

    run(test)


def silent(_writer: asyncio.StreamWriter) -> None:
    """Send nothing."""


@asynccontextmanager
async def listening(answer: Callable[[asyncio.StreamWriter], None]) -> AsyncIterator[int]:
    """A server that is none of gRPC."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer(writer)
        while await reader.read(65_536):
            pass
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answer", "connect_s", "reason"),
    [
        (silent, 0.1, "no connection within"),
        (lambda writer: writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n"), PATIENCE_S, "cannot be reached"),
        (lambda writer: writer.close(), PATIENCE_S, "cannot be reached"),
    ],
)
def test_servers_of_something_else(answer: Any, connect_s: float, reason: str) -> None:
    """Silent ones, others' protocols and closed connections are UNAVAILABLE, and never hang."""

    async def test() -> None:
        async with listening(answer) as port, GrpcChannel(f"{HOST}:{port}", connect_s=connect_s) as channel:
            code, text = await code_of(once(channel, request(1)))
            assert (code, reason in text) == ("UNAVAILABLE", True), text

    run(test)


@pytest.mark.parametrize("address", ["localhost", f"{HOST}:99999", "no-such-host.invalid:1", f"{HOST}:port"])
def test_addresses_that_are_none(address: str) -> None:
    """They are UNAVAILABLE, and no task fails."""

    async def test() -> None:
        async with GrpcChannel(address, connect_s=5) as channel:
            assert (await code_of(once(channel, request(1))))[0] == "UNAVAILABLE"

    run(test)


def test_a_silent_connection_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stopped to answer, as after a cut cable, is given up; one that only has nothing to say is kept."""
    monkeypatch.setattr(grpc_channel, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(grpc_channel, "KEEPALIVE_TIMEOUT_S", 0.1)
    settings_frame = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"

    async def test() -> None:
        async with (
            listening(lambda writer: writer.write(settings_frame)) as port,
            GrpcChannel(f"{HOST}:{port}") as channel,
        ):
            stream = Each(channel)
            code, text = await stream.status()
            assert (code, "does not answer a ping" in text) == ("UNAVAILABLE", True)
        monkeypatch.setattr(grpc_channel, "KEEPALIVE_TIMEOUT_S", 2.0)
        ping, pinged = Http2Connection.ping, []
        monkeypatch.setattr(Http2Connection, "ping", lambda self: (pinged.append(self), ping(self)))
        async with serving() as (_, port, _server), GrpcChannel(f"{HOST}:{port}") as channel:
            stream = Each(channel)
            await until(lambda: len(pinged) == 2)  # the first one has been answered in time
            stream.call.send(request(1))
            await until(lambda: stream.messages == [b"\x01"])

    run(test)


def test_closing_ends_everything() -> None:
    """Calls in flight, calls that wait, and later ones end; nothing is left behind."""

    async def test() -> None:
        async with serving() as (script, port, _server):
            channel = GrpcChannel(f"{HOST}:{port}")
            first = asyncio.create_task(once(channel, request(1, pause_s=600)))
            await until(lambda: len(script.deadlines) == 1)
            await channel.close()
            assert await code_of(first) == ("CANCELLED", "the channel is closed")
            assert await code_of(once(channel, request(1))) == ("CANCELLED", "the channel is closed")
            assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
            await until(lambda: script.cancelled == 1)
        async with listening(silent) as port:
            channel = GrpcChannel(f"{HOST}:{port}")
            waiting = asyncio.create_task(once(channel, request(1)))
            await until(lambda: channel.get_state() is grpc.ChannelConnectivity.CONNECTING)
            await channel.close()
            assert (await code_of(waiting))[0] == "CANCELLED"
        gc.collect()
        assert not [one for one in asyncio.all_tasks() if "GrpcChannel" in repr(one.get_coro())]

    run(test)
