"""Decides in the gateway's own process: the decision core and its driver, without a hop to a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from prometheus_client import Counter

from protos.block.v1 import common_pb2, scheduler_pb2
from services.gateway.schedulers import REFUSALS, UNWILLING, AbandonedDecision, refusal
from services.http.errors import ApiError
from services.placement.driver import PlacementDriver
from services.placement.service import patience_s
from services.rpc.errors import message_of, status_of

IN_PROCESS = "in-process"  # as the scheduler's address in metrics


class InProcessScheduler:
    """Has the interface of `Schedulers`; a decision costs a function call instead of a remote one."""

    def __init__(self, driver: PlacementDriver, *, within_s: float, failures: Counter) -> None:
        """Decide by a driver, within a time for each request."""
        self._driver = driver
        self._within_s = within_s
        self._patience_s = patience_s(within_s, driver.settings.sidecar_deadline_s)
        self._failures = failures

    def __len__(self) -> int:
        """Return the number of schedulers."""
        return 1

    def reachable(self) -> bool:
        """Return whether decisions can be made."""
        return bool(self._driver.registry.directory.by_id)

    async def schedule(
        self,
        request: scheduler_pb2.ScheduleRequest,
        *,
        abandoned: AbandonedDecision | None = None,
        insist: bool = True,
    ) -> scheduler_pb2.ScheduleResponse:
        """Decide; a caller that is cancelled meanwhile leaves no reservation behind."""
        del abandoned, insist  # for decisions that are made elsewhere
        try:
            async with asyncio.timeout(self._within_s):
                decision = await self._driver.schedule(request, self._patience_s)
        except (ValueError, LookupError, ConnectionError, TimeoutError) as error:
            raise self._refused(error) from None
        except Exception as error:
            if status_of(error).grpc_code not in REFUSALS:
                raise
            raise self._refused(error) from None
        return scheduler_pb2.ScheduleResponse(decision=decision)

    def _refused(self, error: Exception) -> ApiError:
        code = status_of(error).grpc_code
        if code in REFUSALS:
            return refusal(code, message_of(error))
        self._failures.labels(IN_PROCESS, code.name).inc()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ApiError(503, f"no decision within {self._within_s:g} s")
        return ApiError(UNWILLING.get(code, 503), message_of(error))

    async def release(self, request: common_pb2.ReleaseRequest) -> bool:
        """Release a request at its instance, and report its outcome."""
        try:
            await self._driver.release(request)
        except ValueError:
            return False
        return True

    async def instances(self) -> Sequence[common_pb2.Instance]:
        """Return all instances."""
        return [handle.message for handle in self._driver.registry.handles()]

    async def close(self) -> None:
        """Do nothing: the driver ends with its own context."""
