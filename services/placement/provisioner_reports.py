"""Reports of every placement with a forecast, of every outcome, and of waiting requests, to the provisioners."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import grpc

from protos.block.v1 import common_pb2, provisioner_pb2, provisioner_pb2_grpc
from scheduler.placement import Placement
from services.logs import log_event
from services.placement.listeners import PlacementListener
from services.placement.replies import note_of
from services.rpc.channels import open_channel
from services.security.own_key import NO_OWN_KEY, OwnKey
from services.supervised_task import supervised

log = logging.getLogger(__name__)

MAX_KEPT = 4096  # while a provisioner is away
PAUSE_S = 1.0
WAITING_S = 0.5  # between two reports of waiting requests
MAX_TARGETS = 256  # of a report of waiting requests: the strictest


class ProvisionerReports(PlacementListener):
    """Sends all reports to every provisioner, each over its own stream, so that any of them can become the leader."""

    def __init__(self, addresses: Sequence[str], scheduler_id: str, key: OwnKey = NO_OWN_KEY) -> None:
        """Connect to them; they may start later."""
        self._scheduler_id, self._sequence = scheduler_id, int(time.time() * 1e6)  # higher than in an earlier process
        self._streams = [ReportStream(address, key) for address in addresses]

    def on_placement(self, request: common_pb2.Request, placement: Placement, message: common_pb2.Decision) -> None:
        """Report a placement, its forecast, and the forecasts of other instances."""
        del message
        forecast = placement.forecast
        if not self._streams or forecast is None:
            return
        forecasts = placement.decision.explanation.forecasts()
        others = [one.e2e_s for name, one in forecasts if name != placement.instance_id]
        all_e2e_s = [*others, forecast.e2e_s]
        asked = placement.decision.request
        self._report(
            provisioner_pb2.ReportRequest(
                placement=provisioner_pb2.Placement(
                    request_id=request.request_id,
                    instance_id=placement.instance_id,
                    forecast=common_pb2.Forecast(
                        ttft_s=forecast.ttft_s,
                        e2e_s=asked.waited_s + placement.held_s + forecast.e2e_s,
                        tpot_s=forecast.tpot_s,
                        queue_s=forecast.queue_s,
                        output_tokens=forecast.output_tokens,
                    ),
                    decided_unix_s=time.time(),
                    prompt_tokens=request.prompt_tokens,
                    best_e2e_s=min(all_e2e_s),
                    worst_e2e_s=max(all_e2e_s),
                    next_best_e2e_s=min(others) if others else None,
                    output_tokens=forecast.output_tokens,
                )
            )
        )

    def on_outcome(self, outcome: common_pb2.Outcome) -> None:
        """Report an outcome."""
        if self._streams:
            self._report(provisioner_pb2.ReportRequest(outcome=outcome))

    def on_release(self, request_id: str, instance_id: str) -> None:
        """Report that a request ended with an unknown outcome."""
        self.on_outcome(common_pb2.Outcome(request_id=request_id, instance_id=instance_id))

    async def follow_waiting(self, waiting_targets: Callable[[], Mapping[float, int]]) -> None:
        """Report how many requests wait, by target, while any does; until cancelled."""
        were_waiting = False
        while self._streams:
            targets = sorted(waiting_targets().items())[:MAX_TARGETS]
            if targets or were_waiting:
                waiting = provisioner_pb2.WaitingRequests(
                    targets=[provisioner_pb2.WaitingTarget(tpot_slo_s=tpot_s, num=num) for tpot_s, num in targets]
                )
                for stream in self._streams:
                    stream.put_waiting(provisioner_pb2.ReportRequest(scheduler_id=self._scheduler_id, waiting=waiting))
            were_waiting = bool(targets)
            await asyncio.sleep(WAITING_S)

    def _report(self, report: provisioner_pb2.ReportRequest) -> None:
        self._sequence += 1
        report.scheduler_id, report.sequence = self._scheduler_id, self._sequence
        for stream in self._streams:
            stream.put(report)

    async def close(self) -> None:
        """Close all streams."""
        await asyncio.gather(*(stream.close() for stream in self._streams))


class ReportStream:
    """A stream of reports to one provisioner; the oldest are dropped when it is away for long."""

    def __init__(self, address: str, key: OwnKey) -> None:
        """Connect, and reconnect whenever the stream ends."""
        self._address = address
        self._unsent: deque[provisioner_pb2.ReportRequest] = deque(maxlen=MAX_KEPT)
        self._waiting: provisioner_pb2.ReportRequest | None = None  # the last one that is not sent yet
        self._has_reports = asyncio.Event()
        self._channel = open_channel(address, key)
        self._sending = asyncio.create_task(supervised("reports", self._stream))

    def put(self, report: provisioner_pb2.ReportRequest) -> None:
        """Send a report soon."""
        self._unsent.append(report)
        self._has_reports.set()

    def put_waiting(self, report: provisioner_pb2.ReportRequest) -> None:
        """Send a report of waiting requests soon, instead of an earlier one."""
        self._waiting = report
        self._has_reports.set()

    async def _stream(self) -> None:
        stub = provisioner_pb2_grpc.ProvisionerStub(self._channel)
        while True:
            try:
                await stub.Report(self._all())
            except grpc.aio.AioRpcError as error:
                log_event(log, logging.DEBUG, "report stream ended", address=self._address, reason=note_of(error))
            await asyncio.sleep(PAUSE_S)

    async def _all(self) -> AsyncIterator[provisioner_pb2.ReportRequest]:
        while True:
            while self._unsent:
                yield self._unsent.popleft()
            if self._waiting is not None:
                report, self._waiting = self._waiting, None
                yield report
                continue
            self._has_reports.clear()
            await self._has_reports.wait()

    async def close(self) -> None:
        """Close the stream and the channel."""
        self._sending.cancel()
        await asyncio.wait([self._sending])
        await self._channel.close()
