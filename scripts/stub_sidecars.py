"""Stubs of sidecars for benches: forecasts that cost nothing, several sidecars behind one port."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from protos.block.v1 import common_pb2, predictor_pb2
from scripts.bench_requests import PLACE


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
                decode_step_s=0.03, queued_prefill_s=0.2, least_tpot_slo_s=0.1, efficient_step_s=0.15,
                step_overhead_s=0.005, prefill_token_s=1e-4,
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
