"""block.v1.Predictor over the sidecars of one node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.predictor_server.instance_endpoint import InstanceEndpoint
from services.predictor_server.sidecar import Sidecar
from services.rpc.errors import MisdirectedError

Context = Any

MAX_REQUESTS = 256  # in one call of Predict


class PredictorService(predictor_pb2_grpc.PredictorServicer):
    """Routes each call to the instances that it names."""

    def __init__(self, sidecars: Iterable[Sidecar], *, max_requests: int = MAX_REQUESTS) -> None:
        """Serve some sidecars; a call may have up to `max_requests` requests."""
        self._instances = {instance.name: instance for instance in map(InstanceEndpoint, sidecars)}
        self._max_requests = max_requests

    async def Predict(self, request: predictor_pb2.PredictRequest, context: Context) -> predictor_pb2.PredictResponse:
        """Forecast each request, and return the indicators."""
        return await self._predict(request)

    async def PredictStream(
        self, request_iterator: AsyncIterator[predictor_pb2.PredictRequest], context: Context
    ) -> AsyncIterator[predictor_pb2.PredictResponse]:
        """Reply to one message after the other."""
        async for request in request_iterator:
            yield await self._predict(request)

    async def Reserve(self, request: predictor_pb2.ReserveRequest, context: Context) -> predictor_pb2.ReserveResponse:
        """Make a reservation, unless another was made since the version that it names."""
        return await self._instance(request.instance_id).reserve(request)

    async def ReserveStream(
        self, request_iterator: AsyncIterator[predictor_pb2.ReserveRequest], context: Context
    ) -> AsyncIterator[predictor_pb2.ReserveResponse]:
        """Make one reservation after the other."""
        async for request in request_iterator:
            yield await self._instance(request.instance_id).reserve(request)

    async def Release(self, request: common_pb2.ReleaseRequest, context: Context) -> common_pb2.ReleaseResponse:
        """Release a reservation."""
        return await self._instance(request.instance_id).release(request)

    async def ReleaseStream(
        self, request_iterator: AsyncIterator[common_pb2.ReleaseRequest], context: Context
    ) -> AsyncIterator[common_pb2.ReleaseResponse]:
        """Release one reservation after the other."""
        async for request in request_iterator:
            yield await self._instance(request.instance_id).release(request)

    async def Watch(
        self, request: predictor_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[predictor_pb2.WatchResponse]:
        """Return the indicators whenever they change, and snapshots where the call asks for them."""
        async for response in self._instance(request.instance_id).watch(request):
            yield response

    async def _predict(self, request: predictor_pb2.PredictRequest) -> predictor_pb2.PredictResponse:
        if len(request.requests) > self._max_requests:
            raise ValueError(f"requests: {len(request.requests)} are more than the limit of {self._max_requests}")
        if not request.instance_ids:
            return await self._instance(request.instance_id).predict(request)
        if request.instance_id:
            raise ValueError("instance_ids: cannot be set with instance_id")
        start_s = time.perf_counter()
        named = [self._instances[name] for name in dict.fromkeys(request.instance_ids) if name in self._instances]
        answers = await _predict_all(named, request)
        return predictor_pb2.PredictResponse(answers=answers, predict_s=time.perf_counter() - start_s)

    def _instance(self, instance_id: str) -> InstanceEndpoint:
        """Return the instance of a name; the name may be missing where there is only one."""
        if instance_id in self._instances:
            return self._instances[instance_id]
        here = ", ".join(map(repr, self._instances))
        if instance_id:
            raise MisdirectedError(f"instance_id: {instance_id!r} is not here, but {here}")
        if len(self._instances) > 1:
            raise ValueError(f"instance_id: is missing; here are {here}")
        return next(iter(self._instances.values()))


async def _predict_all(
    instances: Sequence[InstanceEndpoint], request: predictor_pb2.PredictRequest
) -> Iterable[predictor_pb2.PredictResponse]:
    """Run those concurrently that have to wait; for the others a task would cost more than it saves."""
    num_requests = len(request.requests)
    waiting = {one.name: one for one in instances if not one.replies_at_once(num_requests)}
    tasks = {name: asyncio.ensure_future(one.predict(request)) for name, one in waiting.items()}
    try:
        answers = {one.name: await one.predict(request) for one in instances if one.name not in waiting}
        answers |= dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:
        for task in tasks.values():
            task.cancel()
    return [answers[one.name] for one in instances]
