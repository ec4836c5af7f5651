"""A stub of a scheduler for benches: engines in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scripts.bench_requests import MODEL, NUM_EVENTS, PLACE
from services.security.certificates import Certificates

DRAINS_EVERY_S = 5.0


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
