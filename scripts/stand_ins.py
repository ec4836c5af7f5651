"""Stand-ins of benches for the rest of a cluster: engines, a scheduler, sidecars; each a process on loopback.

They do as little as possible and speak the real wire protocol. `python scripts/stand_ins.py engine`, `scheduler URL…`
and `sidecars NUM TOGETHER` serve until they are ended; they print one line with the port, or the port of each sidecar.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import grpc
import httptools
import uvloop

from protos.block.v1 import common_pb2, predictor_pb2, scheduler_pb2, scheduler_pb2_grpc
from services.http.paths import COMPLETIONS
from services.security.certificates import Certificates
from services.security.settings import NO_TLS, TlsSettings

PLACE = "127.0.0.1"
MODEL = "bench"
NUM_EVENTS = 16
NUM_BLOCKS = 1024  # that a prefill leg leaves
PROMPT_BYTES = 2048
FIRST_MS, GAPS_MS = 40, (8, 9, 10, 11, 12)  # an engine's pace
TOKEN_BYTES = 4

DRAINS_EVERY_S = 5.0


def main() -> None:
    """Serve as the stand-in that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    engine, scheduler = parts.add_parser("engine"), parts.add_parser("scheduler")
    for one in (engine, scheduler):
        one.add_argument("--tls", metavar="DIR", help="certificates of `block certs`; clients must present one, too")
    scheduler.add_argument("urls", nargs="+", help="of the engines")
    sidecars = parts.add_parser("sidecars")
    sidecars.add_argument("num", type=int)
    sidecars.add_argument("together", type=int, help="number behind one port")
    sidecars.add_argument("--changing", action="store_true", help="indicators change all the time, as under load")
    arguments = parser.parse_args()
    if arguments.part == "engine":
        uvloop.run(serve_engine(certificates_in(arguments.tls, "engine")))
    elif arguments.part == "scheduler":
        uvloop.run(serve_scheduler(arguments.urls, certificates_in(arguments.tls, "scheduler")))
    else:
        uvloop.run(serve_sidecars(arguments.num, arguments.together, changing=arguments.changing))


# Engines.


class StubEngine(asyncio.Protocol):
    """Responds to every completion with a stream of events, at the pace that the request has.

    A prefill leg gets the reply of an engine that holds the KV blocks of a long prompt. Other requests of routers get
    the responses of `vllm serve` with default flags: health, models, metrics, and the tokens of a prompt, one for each
    four characters.
    """

    def __init__(self) -> None:
        """Start without a connection."""
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse the data."""
        self._parser.feed_data(data)

    def on_url(self, target: bytes) -> None:
        """Collect the target."""
        self._target += target

    def on_body(self, body: bytes) -> None:
        """Collect the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Start the response."""
        target, body = self._target, self._body
        self._target = self._body = b""
        if target != COMPLETIONS:
            self._transport.write(small_answer(target, body))
            return
        if PREFILL_LEG in body:
            self._transport.write(PREFILLED)
            return
        _, first_ms, gap_ms, _ = body[body.rindex(b"pace") :].split(b" ", 3)
        if first_ms == b"0":
            self._transport.write(HEAD + b"".join(EVENTS))
        else:
            self._later(0, int(first_ms) / 1000, int(gap_ms) / 1000)

    def _later(self, number: int, pause_s: float, gap_s: float) -> None:
        asyncio.get_running_loop().call_later(pause_s, self._event, number, gap_s)

    def _event(self, number: int, gap_s: float) -> None:
        self._transport.write(EVENTS[number] if number else HEAD + EVENTS[0])
        if number + 1 < NUM_EVENTS:
            self._later(number + 1, gap_s, gap_s)
        else:
            self._transport.write(EVENTS[-1])


def small_answer(target: bytes, body: bytes) -> bytes:
    """Respond to a request that is no completion; 404 for what `vllm serve` does not serve by default."""
    kind, text = b"application/json", b""
    if target == b"/tokenize":
        tokens = tokens_of(json.loads(body)["prompt"].encode())
        text = json.dumps({"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": None}).encode()
    elif target == b"/v1/models":
        text = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1}]}).encode()
    elif target == b"/metrics":
        kind, text = b"text/plain; version=0.0.4", METRICS
    elif target != b"/health":
        return b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 22\r\n\r\n" + NOT_FOUND
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(text), text)


def tokens_of(prompt: bytes) -> list[int]:
    """Make a token of each four characters; prompts with the same prefix have tokens with the same prefix."""
    halves = memoryview(prompt + bytes(-len(prompt) % TOKEN_BYTES)).cast("H")
    return halves.tolist()[::2]


def chunk(text: bytes) -> bytes:
    """Frame a piece of a body."""
    return b"%x\r\n%s\r\n" % (len(text), text)


def events() -> Iterator[bytes]:
    """Write a stream as vLLM does."""
    for number in range(NUM_EVENTS):
        reason = '"length"' if number == NUM_EVENTS - 1 else "null"
        choice = f'{{"index":0,"text":" token{number}","logprobs":null,"finish_reason":{reason},"stop_reason":null}}'
        head = f'{{"id":"cmpl-bench","object":"text_completion","created":1,"model":"{MODEL}"'
        yield chunk(f'data: {head},"choices":[{choice}]}}\n\n'.encode())
    yield chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


NOT_FOUND = b'{"detail":"Not Found"}'
METRICS = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="bench"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="bench"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="bench"} 0.25
"""
HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENTS = tuple(events())


def prefilled() -> bytes:
    """Write the reply to a prefill leg as vLLM does."""
    params = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [list(range(NUM_BLOCKS))],
        "remote_engine_id": "2b7c", "remote_request_id": "cmpl-bench-0-1", "remote_host": PLACE, "remote_port": 5600,
        "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 16 * NUM_BLOCKS,
        "remote_blocks_expiry_time": None, "transfer_mode": "pull", "remote_prefill_cached_tokens": 0,
    }  # fmt: skip
    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    text = json.dumps({"id": "cmpl-bench", "model": MODEL, "choices": [choice], "kv_transfer_params": params}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text)


PREFILL_LEG = b'"do_remote_decode":true'
PREFILLED = prefilled()


def certificates_in(folder: str | None, part: str) -> Certificates:
    """Return the certificates of a part, or none."""
    if not folder:
        return Certificates(NO_TLS)
    return Certificates(
        TlsSettings(tls_cert=f"{folder}/{part}.crt", tls_key=f"{folder}/{part}.key", tls_ca=f"{folder}/ca.crt")
    )


async def serve_engine(certificates: Certificates) -> None:
    """Serve as an engine."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(StubEngine, PLACE, 0, ssl=certificates.server_context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def text_of(rng: random.Random, length: int) -> str:
    """Return random words with a total length; none of them is a pace."""
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 9))) for _ in range(length // 3 + 1)]
    return " ".join(words)[:length]


def request_body(prompt: str, first_ms: int = 0, gap_ms: int = 0, *, has_targets: bool = False) -> bytes:
    """Return a request; the engine reads its pace from it, and responds at once if that is 0."""
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": prompt, "max_tokens": NUM_EVENTS, "ignore_eos": True, "stream": True
    }  # fmt: skip
    if has_targets:
        fields["vllm_xargs"] = {"block_ttft_s": 0.1, "block_tpot_s": 0.02}
    return json.dumps({**fields, "user": f"pace {first_ms} {gap_ms} end"}).encode()


# The scheduler.


class InTurn(scheduler_pb2_grpc.SchedulerServicer):
    """Sends requests to the engines in turn."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Take the engines' URLs."""
        self._instances = [
            common_pb2.Instance(instance_id=f"engine-{number}", engine_url=url, models=[MODEL])
            for number, url in enumerate(urls)
        ]
        self._turn = 0

    async def Schedule(  # noqa: N802 - the wire's name
        self,
        request: scheduler_pb2.ScheduleRequest,
        context: grpc.aio.ServicerContext[scheduler_pb2.ScheduleRequest, scheduler_pb2.ScheduleResponse],  # noqa: ARG002
    ) -> scheduler_pb2.ScheduleResponse:
        """Decide."""
        self._turn += 1
        here = self._turn % len(self._instances)
        decision = common_pb2.Decision(
            request_id=request.request.request_id,
            instance=self._instances[here],
            policy="round_robin",
            forecast=common_pb2.Forecast(ttft_s=0.04, e2e_s=0.2, tpot_s=0.01, output_tokens=NUM_EVENTS),
            tag=common_pb2.Tag(median_tokens=NUM_EVENTS, estimator="client", confidence=1),
            next_best=[one for number, one in enumerate(self._instances) if number != here],
        )
        return scheduler_pb2.ScheduleResponse(decision=decision)

    async def WatchDrains(  # noqa: N802 - the wire's name
        self, request: scheduler_pb2.WatchDrainsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[scheduler_pb2.WatchDrainsResponse]:
        """Say that no instance drains."""
        del request, context
        while True:
            yield scheduler_pb2.WatchDrainsResponse(now_unix_s=time.time())
            await asyncio.sleep(DRAINS_EVERY_S)

    async def _refuse(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Refuse a call that the bench does not make."""
        del request
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the bench does not call it")

    Generate = Explain = ListInstances = UsePolicy = Tail = _refuse  # type: ignore[assignment]  # two of them stream

    async def Release(  # noqa: N802 - the wire's name
        self,
        request: common_pb2.ReleaseRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[common_pb2.ReleaseRequest, common_pb2.ReleaseResponse],  # noqa: ARG002
    ) -> common_pb2.ReleaseResponse:
        """Accept a release."""
        return common_pb2.ReleaseResponse(released=True)


async def serve_scheduler(urls: Sequence[str], certificates: Certificates) -> None:
    """Serve as a scheduler."""
    server = grpc.aio.server()
    credentials = certificates.grpc_server_credentials()
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(InTurn(urls), server)
    address = f"{PLACE}:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


# Sidecars.


class StubSidecar:
    """Forecasts a latency that grows with each reservation; all other values are constant."""

    def __init__(self, name: str, *, changing: bool) -> None:
        """Start without reservations; one that is `changing` reports as often as it may."""
        self._changing = changing
        self._held: set[str] = set()
        self._answer = predictor_pb2.PredictResponse(
            instance_id=name,
            epoch=7,
            state=common_pb2.INSTANCE_STATE_READY,
            predict_s=1e-4,
            indicators=common_pb2.Indicators(
                age_s=0.003, source=common_pb2.STATE_SOURCE_EXPORTED, num_running=24, num_waiting=2, num_reserved=0,
                num_total_blocks=1056, num_free_blocks=345, num_reserved_blocks=12, num_waiting_blocks=34,
                queued_prefill_tokens=1234, context_tokens=9876, remaining_tokens=5432, requests_per_minute=180.0,
                kv_hit_ratio=0.25, pace=1.01, step_s=0.031, num_preemptions_total=3, num_finished_total=999,
                decode_step_s=0.03, queued_prefill_s=0.2, least_tpot_slo_s=0.1,
            ),
            predictions=[predictor_pb2.Prediction(prefix_hit_tokens=0, new_prefill_tokens=100)],
        )  # fmt: skip

    def _forecast(self, request: common_pb2.Request, *, delays: bool) -> predictor_pb2.PredictResponse:
        prediction = self._answer.predictions[0]
        prediction.request_id = request.request_id
        prediction.forecast.CopyFrom(
            common_pb2.Forecast(
                request_id=request.request_id, ttft_s=0.2 + 0.01 * len(self._held), e2e_s=7.0 + 0.1 * len(self._held),
                tpot_s=0.03, queue_s=0.1, output_tokens=210,
            )
        )  # fmt: skip
        if delays:
            prediction.forecast.MergeFrom(
                common_pb2.Forecast(
                    others_preempted=0, delay_sum_s=0.5, delay_worst_s=0.1, others_missed=0.0, gain_before=900.0,
                    gain_after=1000.0 - len(self._held), least_slack_s=0.2,
                )
            )  # fmt: skip
        self._answer.indicators.num_reserved = len(self._held)
        return self._answer

    def predict(self, request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
        """Respond with a forecast, or with indicators alone if no request is given."""
        if not request.requests:
            return self._answer
        return self._forecast(request.requests[0], delays=request.with_delays)

    async def watch(self, request: predictor_pb2.WatchRequest) -> Any:
        """Report whenever a reservation was made or released."""
        sequence, reported = 0, -1
        while True:
            if self._changing or len(self._held) != reported:
                sequence, reported = sequence + 1, len(self._held)
                self._answer.indicators.num_reserved = reported
                yield predictor_pb2.WatchResponse(
                    instance_id=self._answer.instance_id,
                    sequence=sequence,
                    full=True,
                    indicators=self._answer.indicators,
                    version=self._answer.version,
                    epoch=7,
                    state=self._answer.state,
                )
            await asyncio.sleep(request.min_interval_s)

    def reserve(self, request: predictor_pb2.ReserveRequest) -> predictor_pb2.ReserveResponse:
        """Reserve, unless another reservation came first."""
        response = predictor_pb2.ReserveResponse(
            instance_id=self._answer.instance_id, epoch=7, expires_in_s=request.ttl_s
        )
        if request.HasField("if_version") and request.if_version != self._answer.version:
            response.result = predictor_pb2.RESERVE_RESULT_CONFLICT
            delays = request.forecast.HasField("others_missed")
            response.prediction.CopyFrom(self._forecast(request.request, delays=delays).predictions[0])
        else:
            response.result = predictor_pb2.RESERVE_RESULT_RESERVED
            self._held.add(request.request.request_id)
            self._answer.version += 1
        response.version = self._answer.version
        response.indicators.CopyFrom(self._answer.indicators)
        return response

    def release(self, request: common_pb2.ReleaseRequest) -> common_pb2.ReleaseResponse:
        """Release a reservation."""
        self._held.discard(request.request_id)
        return common_pb2.ReleaseResponse(released=True, indicators=self._answer.indicators)


class StubNode:
    """Sidecars behind one port."""

    def __init__(self, names: Sequence[str], *, changing: bool) -> None:
        """Serve for some instances."""
        self._sidecars = {name: StubSidecar(name, changing=changing) for name in names}

    async def predict(self, request: predictor_pb2.PredictRequest, _: Any) -> predictor_pb2.PredictResponse:
        """Respond for one instance or for several."""
        if request.instance_ids:
            answers = [self._sidecars[name].predict(request) for name in request.instance_ids]
            return predictor_pb2.PredictResponse(answers=answers)
        return self._sidecars[request.instance_id].predict(request)

    async def predict_stream(self, requests: Any, context: Any) -> Any:
        """Respond to each request of a stream."""
        async for request in requests:
            yield await self.predict(request, context)

    async def watch(self, request: predictor_pb2.WatchRequest, _: Any) -> Any:
        """Report one instance."""
        async for response in self._sidecars[request.instance_id].watch(request):
            yield response

    async def reserve(self, request: predictor_pb2.ReserveRequest, _: Any) -> predictor_pb2.ReserveResponse:
        """Reserve."""
        return self._sidecars[request.instance_id].reserve(request)

    async def reserve_stream(self, requests: Any, context: Any) -> Any:
        """Make each reservation of a stream."""
        async for request in requests:
            yield await self.reserve(request, context)

    async def release(self, request: common_pb2.ReleaseRequest, _: Any) -> common_pb2.ReleaseResponse:
        """Release a reservation."""
        return self._sidecars[request.instance_id].release(request)

    async def release_stream(self, requests: Any, context: Any) -> Any:
        """Release each reservation of a stream."""
        async for request in requests:
            yield await self.release(request, context)


async def serve_sidecars(num: int, together: int, *, changing: bool) -> None:
    """Serve one port for each node, print the port of each sidecar, and continue."""
    ports, servers = [], []
    names = [f"i{number}" for number in range(num)]
    for first in range(0, num, together):
        here = names[first : first + together]
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((handlers_of(StubNode(here, changing=changing)),))
        ports += len(here) * [server.add_insecure_port(f"{PLACE}:0")]
        await server.start()
        servers.append(server)
    print(*ports, flush=True)
    await asyncio.gather(*(server.wait_for_termination() for server in servers))


def handlers_of(node: StubNode) -> grpc.GenericRpcHandler:
    """Return the handlers of the Predictor service."""
    parse, write = predictor_pb2.PredictRequest.FromString, predictor_pb2.PredictResponse.SerializeToString
    handlers: dict[str, Any] = {
        "Predict": grpc.unary_unary_rpc_method_handler(node.predict, parse, write),
        "Watch": grpc.unary_stream_rpc_method_handler(
            node.watch, predictor_pb2.WatchRequest.FromString, predictor_pb2.WatchResponse.SerializeToString
        ),
        "PredictStream": grpc.stream_stream_rpc_method_handler(node.predict_stream, parse, write),
        "Reserve": grpc.unary_unary_rpc_method_handler(
            node.reserve, predictor_pb2.ReserveRequest.FromString, predictor_pb2.ReserveResponse.SerializeToString
        ),
        "ReserveStream": grpc.stream_stream_rpc_method_handler(
            node.reserve_stream,
            predictor_pb2.ReserveRequest.FromString,
            predictor_pb2.ReserveResponse.SerializeToString,
        ),
        "ReleaseStream": grpc.stream_stream_rpc_method_handler(
            node.release_stream, common_pb2.ReleaseRequest.FromString, common_pb2.ReleaseResponse.SerializeToString
        ),
        "Release": grpc.unary_unary_rpc_method_handler(
            node.release, common_pb2.ReleaseRequest.FromString, common_pb2.ReleaseResponse.SerializeToString
        ),
    }
    return grpc.method_handlers_generic_handler("block.v1.Predictor", handlers)


if __name__ == "__main__":
    main()
