"""All gRPC servers: statuses, limits, deadlines, draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.rpc.channels import MAX_METADATA_BYTES, refuse_taken
from services.rpc.server import RunningServer, ServerSettings, serving
from services.security.settings import TlsSettings
from tests.services.waiting import LIMIT_S, run

INSECURE = TlsSettings(insecure=True)
PREDICT = predictor_pb2.PredictRequest(instance_id="a")
WATCH = predictor_pb2.WatchRequest(instance_id="a")


class Sidecar(predictor_pb2_grpc.PredictorServicer):
    """A servicer whose behaviour a test sets."""

    def __init__(self) -> None:
        """Respond at once."""
        self.started = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.left = asyncio.Semaphore(0)
        self.error: Exception | None = None

    async def Predict(self, request: predictor_pb2.PredictRequest, context: Any) -> predictor_pb2.PredictResponse:
        """Respond when `may_end` is set."""
        self.started.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.left.release()
            raise
        if self.error is not None:
            raise self.error
        if request.instance_id == "abort":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not me")
        return predictor_pb2.PredictResponse(instance_id=request.instance_id)

    async def Watch(
        self, request: predictor_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[predictor_pb2.WatchResponse]:
        """Send one message, and then nothing until the client leaves."""
        try:
            self.started.set()
            yield predictor_pb2.WatchResponse(sequence=1)
            await asyncio.Event().wait()
        finally:
            self.left.release()

    async def Reserve(self, request: Any, context: Any) -> Any:
        """Fail."""
        raise NotImplementedError

    async def Release(self, request: Any, context: Any) -> Any:
        """Fail."""
        raise NotImplementedError


@asynccontextmanager
async def sidecar(**settings: Any) -> AsyncIterator[tuple[Sidecar, Any, Any, RunningServer]]:
    """A server and a channel to it."""
    servicer = Sidecar()
    register = partial(predictor_pb2_grpc.add_PredictorServicer_to_server, servicer)
    endless = ["/block.v1.Predictor/Watch"]
    async with (
        serving(ServerSettings(**settings), [register], CollectorRegistry(), endless=endless) as here,
        grpc.aio.insecure_channel(f"127.0.0.1:{here.port}") as channel,
    ):
        yield servicer, predictor_pb2_grpc.PredictorStub(channel), channel, here


async def refused(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    """The error that a call ends in."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (ValueError("requests[0].prompt_tokens:\n must be"), "INVALID_ARGUMENT", "requests[0].prompt_tokens: must be"),
        (ValueError("model: '\ud800" + "x" * 9999), "INVALID_ARGUMENT", "model: '\\ud800x"),
        (TimeoutError("the engine took too long"), "DEADLINE_EXCEEDED", "the engine took too long"),
        (ConnectionRefusedError(111, "refused"), "UNAVAILABLE", "refused"),
        (ZeroDivisionError("secret"), "INTERNAL", "the server's log"),
    ],
)
def test_exceptions_become_statuses(
    error: Exception, code: str, details: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each exception has its status and a short message; details of internal errors go to the log only."""

    async def test() -> None:
        async with sidecar() as (servicer, stub, *_):
            servicer.error = error
            failure = await refused(stub.Predict(PREDICT))
            assert failure.code().name == code
            assert details in str(failure.details())
            assert len(str(failure.details())) < 600
            servicer.error = None
            assert (await stub.Predict(PREDICT)).instance_id == "a"

    run(test)
    assert ("secret" in caplog.text) == (code == "INTERNAL")


def test_a_servicer_may_abort_with_a_status() -> None:
    """The status passes unchanged."""

    async def test() -> None:
        async with sidecar() as (_, stub, *_rest):
            failure = await refused(stub.Predict(predictor_pb2.PredictRequest(instance_id="abort")))
            assert (failure.code(), failure.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "not me")

    run(test)


def test_garbage_is_refused_and_the_server_lives() -> None:
    """Bytes that are not a message are an invalid argument, for any kind of method."""

    async def test() -> None:
        async with sidecar() as (_, stub, channel, _here):
            for raw in (b"\xff" * 40, b"\x1a\x02\xff\xfe\x22\x02\xff\xfe"):  # no fields; names that are not UTF-8
                failure = await refused(channel.unary_unary("/block.v1.Predictor/Predict")(raw))
                assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
                watched = channel.unary_stream("/block.v1.Predictor/Watch")(raw)
                failure = await refused(watched.read())
                assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
            failure = await refused(channel.unary_unary("/block.v1.Predictor/Nothing")(b""))
            assert failure.code() is grpc.StatusCode.UNIMPLEMENTED
            assert (await stub.Predict(PREDICT)).instance_id == "a"

    run(test)


def test_the_limit_of_calls_does_not_apply_to_health() -> None:
    """Calls beyond the limit are refused at once; calls of the health service are not counted."""

    async def test() -> None:
        async with sidecar(max_concurrency=2) as (servicer, stub, channel, _):
            servicer.may_end.clear()
            calls = [asyncio.ensure_future(stub.Predict(PREDICT)) for _ in range(5)]
            refusals = [await refused(calls.pop(calls.index(done))) for done in await first(calls, 3)]
            assert {failure.code() for failure in refusals} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            servicer.may_end.set()
            for call in calls:
                assert (await call).instance_id == "a"

    run(test)


async def first(calls: list[asyncio.Future[Any]], number: int) -> list[asyncio.Future[Any]]:
    """Return the calls that end first."""
    done: set[asyncio.Future[Any]] = set()
    while len(done) < number:
        more, _ = await asyncio.wait(set(calls) - done, return_when=asyncio.FIRST_COMPLETED)
        done |= more
    return list(done)


def test_a_deadline_or_a_cancellation_stops_the_work() -> None:
    """Both end the work at the server."""

    async def test() -> None:
        async with sidecar() as (servicer, stub, *_):
            await stub.Predict(PREDICT)  # the connection is there
            servicer.may_end.clear()
            failure = await refused(stub.Predict(PREDICT, timeout=1.0))
            assert failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await servicer.left.acquire()
            watch = stub.Watch(WATCH)
            assert (await watch.read()).sequence == 1
            watch.cancel()
            await servicer.left.acquire()

    run(test)


def test_calls_under_way_finish_and_endless_streams_are_cut_off() -> None:
    """While draining, a call under way gets its response, new ones are refused, and a watcher is cut off without delay."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        entered: asyncio.Future[tuple[Any, ...]] = loop.create_future()

        async def serve() -> None:
            async with sidecar(drain_s=LIMIT_S) as held:
                entered.set_result(held)
                await ended.wait()

        server = asyncio.create_task(serve())
        servicer, _, _, here = await entered
        servicer.may_end.clear()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{here.port}") as channel:
            stub = predictor_pb2_grpc.PredictorStub(channel)
            stubs: Any = health_pb2_grpc.HealthStub(channel)
            health = stubs.Watch(health_pb2.HealthCheckRequest())
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(WATCH)
            await watch.read()
            servicer.started.clear()
            under_way = asyncio.ensure_future(stub.Predict(PREDICT))
            await servicer.started.wait()
            ended.set()
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await asyncio.sleep(0.2)  # longer than SETTLE_S
            assert not under_way.done()
            assert not server.done()
            servicer.may_end.set()
            assert (await under_way).instance_id == "a"
            begin_s = loop.time()
            await server
            assert loop.time() - begin_s < LIMIT_S / 2
            assert (await refused(watch.read())).code() in (
                grpc.StatusCode.CANCELLED,
                grpc.StatusCode.UNAVAILABLE,
            )

    run(test)


def test_draining_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """A call that never ends is cut off and logged when the drain time is over."""

    async def test() -> None:
        async with AsyncExitStack() as channels:
            async with sidecar(drain_s=0.1) as (servicer, _, _channel, here):
                channel = grpc.aio.insecure_channel(f"127.0.0.1:{here.port}")
                stub = predictor_pb2_grpc.PredictorStub(await channels.enter_async_context(channel))
                servicer.may_end.clear()
                call = asyncio.ensure_future(stub.Predict(PREDICT))
                await servicer.started.wait()
            await servicer.left.acquire()
            assert (await refused(call)).code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)

    with caplog.at_level("WARNING"):
        run(test)
    assert "cut off" in caplog.text


def test_large_messages_pass_up_to_the_limit() -> None:
    """Messages above gRPC's own limit of four mebibytes pass, those above ours do not."""

    async def test() -> None:
        async with sidecar(max_message_mib=6) as (_, stub, *_rest):
            large = predictor_pb2.PredictRequest(requests=[common_pb2.Request(prefix_hashes=[b"x" * 5 * 2**20])])
            await stub.Predict(large)
            larger = predictor_pb2.PredictRequest(requests=[common_pb2.Request(prefix_hashes=[b"x" * 7 * 2**20])])
            assert (await refused(stub.Predict(larger))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(test)


def test_metadata_have_a_limit() -> None:
    """A call with more metadata than the limit is refused, and the connection serves the next one."""

    async def test() -> None:
        async with sidecar() as (_, stub, *_rest):
            await stub.Predict(PREDICT, metadata=[("x-some", "y" * 8000)])
            error = await refused(stub.Predict(PREDICT, metadata=[("x-much", "y" * 2 * MAX_METADATA_BYTES)]))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await stub.Predict(PREDICT)

    run(test)


def test_metrics_are_served_on_a_port_of_their_own() -> None:
    """Calls are counted by method and status."""

    async def test() -> None:
        async with sidecar(metrics_port=0) as (servicer, stub, _, here):
            await stub.Predict(PREDICT)
            servicer.error = ValueError("model: is unknown")
            await refused(stub.Predict(PREDICT))
            url = f"http://127.0.0.1:{here.metrics_port}/metrics"
            text = await asyncio.to_thread(lambda: urlopen(url).read().decode())
        method = 'method="/block.v1.Predictor/Predict"'
        assert f'block_grpc_requests_total{{code="OK",{method}}} 1.0' in text
        assert f'block_grpc_requests_total{{code="INVALID_ARGUMENT",{method}}} 1.0' in text
        assert f"block_grpc_request_seconds_count{{{method}}} 2.0" in text

    run(test)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, "port: must lie between 0 and 65535"),
        ({"metrics_port": -1}, "metrics_port: must lie"),
        ({"max_concurrency": 0}, "max_concurrency: must be at least 1"),
        ({"max_message_mib": 0}, "max_message_mib: must lie"),
        ({"drain_s": float("nan")}, "drain_s: must be a time"),
        (
            {"host": "nowhere.invalid", "port": 1, "tls": INSECURE},
            "host: 'nowhere.invalid' is no address of this machine",
        ),
        ({"host": "203.0.113.9", "port": 50999, "tls": INSECURE}, "host: '203.0.113.9' is no address of this machine"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    """The error names the setting."""

    async def test() -> None:
        async with sidecar(**settings):
            raise AssertionError

    with pytest.raises(ValueError, match=message):
        run(test)


def test_a_port_in_use_is_refused() -> None:
    """Two servers never share a port, neither for calls nor for metrics."""

    async def test() -> None:
        async with sidecar(metrics_port=0) as (*_, here):
            for settings in ({"port": here.port}, {"metrics_port": here.metrics_port}):
                with pytest.raises(ValueError, match="is in use"):
                    async with sidecar(**settings):
                        raise AssertionError

    run(test)


def test_loopback_by_default_and_ipv6_by_name() -> None:
    """By default no other machine can reach a server."""
    assert ServerSettings().host == "127.0.0.1"

    async def test() -> None:
        async with (
            sidecar(host="::1") as (*_, here),
            grpc.aio.insecure_channel(f"[::1]:{here.port}") as channel,
        ):
            assert (await predictor_pb2_grpc.PredictorStub(channel).Predict(PREDICT)).instance_id == "a"

    try:
        refuse_taken("::1", 0, "port")
    except ValueError as error:
        pytest.skip(f"no IPv6 here: {error}")
    run(test)
