"""grpc.health.v1 of the endpoint picker, under the names that proxies and charts ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.envoy.v3 import external_processor_pb2 as wire

EXT_PROC = wire.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
LIVENESS = "liveness"
READINESS = ("", "readiness", "inference-extension", EXT_PROC)
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class PickerHealth(health_pb2_grpc.HealthServicer):
    """Answers whether the process lives, and whether it can choose endpoints; `Watch` is not implemented."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        """Take a function that says whether it can choose."""
        self._is_ready = is_ready

    async def Check(  # noqa: N802 - the wire names it
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Answer one check."""
        if request.service == LIVENESS:
            return health_pb2.HealthCheckResponse(status=SERVING)
        if request.service not in READINESS:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service: {request.service!r} is not known here")
        return health_pb2.HealthCheckResponse(status=SERVING if self._is_ready() else NOT_SERVING)
