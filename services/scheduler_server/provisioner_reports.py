"""Telling provisioners of every forecast acted on and every outcome; nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

import grpc

from protos.block.v1 import common_pb2, provisioner_pb2, provisioner_pb2_grpc
from services.logs import log_event
from services.scheduler_server.placement_request import Placement, PlacementRequest
from services.scheduler_server.replies import note_of
from services.scheduler_server.sidecar_connection import CHANNEL
from services.supervised_task import supervised

log = logging.getLogger(__name__)

MOST_KEPT = 4096  # while a provisioner is away
PAUSE_S = 1.0


class ProvisionerReports:
    """What any number of provisioners are told, each in its own time: whoever leads next has heard all of it."""

    def __init__(self, addresses: Sequence[str], scheduler_id: str) -> None:
        """Call them; they may come later."""
        self._scheduler_id, self._sequence = scheduler_id, int(time.time() * 1e6)  # above that of an earlier process
        self._listeners = [ReportStream(address) for address in addresses]

    def placed(self, wish: PlacementRequest, placement: Placement) -> None:
        """Tell where a request went, and what was foreseen there and elsewhere."""
        if not self._listeners or wish.dry_run or placement.forecast is None:
            return
        others = [
            one.forecast.e2e_s
            for one in placement.candidates
            if one.forecast is not None and one.instance_id != placement.chosen.name and one.is_compared
        ]
        every = [*others, placement.forecast.e2e_s]
        forecast = placement.forecast
        self._tell(
            provisioner_pb2.ReportRequest(
                placement=provisioner_pb2.Placement(
                    request_id=wish.request.request_id,
                    instance_id=placement.chosen.name,
                    forecast=common_pb2.Forecast(
                        ttft_s=forecast.ttft_s,
                        e2e_s=wish.waited_s + placement.held_s + forecast.e2e_s,
                        tpot_s=forecast.tpot_s,
                        queue_s=forecast.queue_s,
                        output_tokens=forecast.output_tokens,
                    ),
                    decided_unix_s=time.time(),
                    prompt_tokens=wish.request.prompt_tokens,
                    best_e2e_s=min(every),
                    worst_e2e_s=max(every),
                    next_best_e2e_s=min(others) if others else None,
                    output_tokens=forecast.output_tokens,
                )
            )
        )

    def ended(self, outcome: common_pb2.Outcome) -> None:
        """Tell what became of a request."""
        if self._listeners:
            self._tell(provisioner_pb2.ReportRequest(outcome=outcome))

    def _tell(self, report: provisioner_pb2.ReportRequest) -> None:
        self._sequence += 1
        report.scheduler_id, report.sequence = self._scheduler_id, self._sequence
        for listener in self._listeners:
            listener.tell(report)

    async def close(self) -> None:
        """Hang up."""
        await asyncio.gather(*(listener.close() for listener in self._listeners))


class ReportStream:
    """One provisioner; the oldest is forgotten when it stays away for long."""

    def __init__(self, address: str) -> None:
        """Call it, again and again."""
        self._address = address
        self._untold: deque[provisioner_pb2.ReportRequest] = deque(maxlen=MOST_KEPT)
        self._something = asyncio.Event()
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL)
        self._talking = asyncio.create_task(supervised("reporting", self._talk))

    def tell(self, report: provisioner_pb2.ReportRequest) -> None:
        """Have it hear, soon."""
        self._untold.append(report)
        self._something.set()

    async def _talk(self) -> None:
        stub = provisioner_pb2_grpc.ProvisionerStub(self._channel)
        while True:
            try:
                await stub.Report(self._all())
            except grpc.aio.AioRpcError as error:
                log_event(log, logging.DEBUG, "provisioner hears nothing", address=self._address, reason=note_of(error))
            await asyncio.sleep(PAUSE_S)

    async def _all(self) -> AsyncIterator[provisioner_pb2.ReportRequest]:
        while True:
            while self._untold:
                yield self._untold.popleft()
            self._something.clear()
            await self._something.wait()

    async def close(self) -> None:
        """Hang up."""
        self._talking.cancel()
        await asyncio.wait([self._talking])
        await self._channel.close()
