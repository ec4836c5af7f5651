"""block.v1.Predictor, as gRPC has it, over the instances of one node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.predictor_server.instance import InstanceEndpoint
from services.predictor_server.sidecar import Sidecar
from services.rpc.errors import MisdirectedError

Context = Any


class PredictorService(predictor_pb2_grpc.PredictorServicer):
    """Finds out who is meant."""

    def __init__(self, sidecars: Iterable[Sidecar], *, most_at_once: int = 256) -> None:
        """Answer for some sidecars; a question may be about so many requests."""
        self._instances = {instance.name: instance for instance in map(InstanceEndpoint, sidecars)}
        self._most_at_once = most_at_once

    async def Predict(self, request: predictor_pb2.PredictRequest, context: Context) -> predictor_pb2.PredictResponse:
        """Forecast each request, and tell the indicators."""
        return await self._predict(request)

    async def PredictStream(
        self, request_iterator: AsyncIterator[predictor_pb2.PredictRequest], context: Context
    ) -> AsyncIterator[predictor_pb2.PredictResponse]:
        """Answer one question after the other."""
        async for request in request_iterator:
            yield await self._predict(request)

    async def Reserve(self, request: predictor_pb2.ReserveRequest, context: Context) -> predictor_pb2.ReserveResponse:
        """Promise a place, unless others came first."""
        return await self._named(request.instance_id).reserve(request)

    async def ReserveStream(
        self, request_iterator: AsyncIterator[predictor_pb2.ReserveRequest], context: Context
    ) -> AsyncIterator[predictor_pb2.ReserveResponse]:
        """Promise one place after the other."""
        async for request in request_iterator:
            yield await self._named(request.instance_id).reserve(request)

    async def Release(self, request: common_pb2.ReleaseRequest, context: Context) -> common_pb2.ReleaseResponse:
        """End a promise."""
        return await self._named(request.instance_id).release(request)

    async def Watch(
        self, request: predictor_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[predictor_pb2.WatchResponse]:
        """Tell the indicators whenever they change, and the whole state where it is wanted."""
        async for response in self._named(request.instance_id).watch(request):
            yield response

    async def _predict(self, request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
        if len(request.requests) > self._most_at_once:
            raise ValueError(f"requests: {len(request.requests)} are more than {self._most_at_once}, the most at once")
        if not request.instance_ids:
            return await self._named(request.instance_id).predict(request)
        if request.instance_id:
            raise ValueError("instance_ids: goes without instance_id")
        start_s = time.perf_counter()
        named = [self._instances[name] for name in dict.fromkeys(request.instance_ids) if name in self._instances]
        answers = await _answers(named, request)
        return predictor_pb2.PredictResponse(answers=answers, predict_s=time.perf_counter() - start_s)

    def _named(self, instance_id: str) -> InstanceEndpoint:
        """Find who is meant."""
        if instance_id in self._instances:
            return self._instances[instance_id]
        here = ", ".join(map(repr, self._instances))
        if instance_id:
            raise MisdirectedError(f"instance_id: {instance_id!r} is not here, but {here}")
        if len(self._instances) > 1:
            raise ValueError(f"instance_id: is missing; here are {here}")
        return next(iter(self._instances.values()))


async def _answers(
    instances: Sequence[InstanceEndpoint], request: predictor_pb2.PredictRequest
) -> Iterable[predictor_pb2.PredictResponse]:
    """Have those answer side by side that need a thread; for the others a task would cost more than it saves."""
    num_requests = len(request.requests)
    slow = {one.name: one for one in instances if not one.answers_at_once(num_requests)}
    under_way = {name: asyncio.ensure_future(one.predict(request)) for name, one in slow.items()}
    try:
        answers = {one.name: await one.predict(request) for one in instances if one.name not in slow}
        answers |= dict(zip(under_way, await asyncio.gather(*under_way.values()), strict=True))
    finally:
        for task in under_way.values():
            task.cancel()
    return [answers[one.name] for one in instances]
