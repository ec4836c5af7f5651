"""Follows the instances of a scheduler by its gRPC service and theirs, and reads /metrics beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import grpc

from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.http.client import HttpClient
from services.http.origin import origin_of
from services.rpc.channels import open_channel
from services.security.own_key import NO_OWN_KEY, OwnKey
from services.top.counts import Counted, MetricSamples
from services.top.reading import ClusterReading, cluster_reading, instance_reading

CALL_S = 3.0
PAUSE_S = 0.5  # before a sidecar is asked again
MAX_METRICS_BYTES = 64 * 2**20
OK = 200


class InstanceWatch:
    """What the sidecar of one instance reports."""

    def __init__(self, instance: common_pb2.Instance, key: OwnKey) -> None:
        """Follow it from now on; needs a running event loop."""
        self._key = key
        self.instance = instance
        self.state = instance.state
        self.indicators: common_pb2.Indicators | None = None
        self._seen_s = 0.0
        self.heard = asyncio.Event()  # set by the first report, and by a failure
        self._task = asyncio.create_task(self._follow())

    @property
    def age_s(self) -> float | None:
        """How old what is known is."""
        return None if self.indicators is None else time.monotonic() - self._seen_s

    async def stop(self) -> None:
        """Follow it no more."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _follow(self) -> None:
        request = predictor_pb2.WatchRequest(instance_id=self.instance.instance_id)
        async with open_channel(self.instance.sidecar_address, self._key) as channel:
            stub = predictor_pb2_grpc.PredictorStub(channel)
            while True:
                try:
                    async for message in stub.Watch(request):
                        self._take(message)
                except grpc.aio.AioRpcError:
                    self.state, self.indicators = common_pb2.INSTANCE_STATE_UNSPECIFIED, None
                self.heard.set()
                await asyncio.sleep(PAUSE_S)

    def _take(self, message: predictor_pb2.WatchResponse) -> None:
        if message.full or self.indicators is None:
            self.indicators = common_pb2.Indicators()
        self.indicators.MergeFrom(message.indicators)
        self.state = message.state
        self._seen_s = time.monotonic() - message.indicators.age_s
        self.heard.set()


class ClusterWatch:
    """All instances that a scheduler lists, and the metrics of gateways and schedulers."""

    def __init__(self, schedulers: Sequence[str], metrics: Sequence[str], key: OwnKey = NO_OWN_KEY) -> None:
        """Ask the first scheduler that replies; `metrics` are the URLs of servers with /metrics."""
        self._key = key
        self._schedulers, self._metrics = schedulers, metrics
        self._instances: dict[str, InstanceWatch] = {}
        self._client = HttpClient()
        self._before = MetricSamples(at_s=time.monotonic())

    async def first(self, interval_s: float) -> ClusterReading:
        """Read once, after an interval in which rates are counted."""
        await self.read()
        waits = [one.heard.wait() for one in self._instances.values()]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), CALL_S)
        await asyncio.sleep(interval_s)
        return await self.read()

    async def read(self) -> ClusterReading:
        """Read everything; rates are those since the reading before."""
        problems: list[str] = []
        listed = await self._listed(problems)
        after = await self._samples(problems)
        counted = Counted(before=self._before, after=after)
        self._before = after
        readings = [
            instance_reading(one.instance, one.state, one.indicators, one.age_s, counted)
            for one in self._instances.values()
        ]
        return cluster_reading(listed.scheduler_id, listed.policy, readings, counted, problems)

    async def close(self) -> None:
        """Follow nothing more."""
        for one in self._instances.values():
            await one.stop()
        self._client.close()

    async def _listed(self, problems: list[str]) -> scheduler_pb2.ListInstancesResponse:
        for address in self._schedulers:
            async with open_channel(address, self._key) as channel:
                try:
                    listed = await scheduler_pb2_grpc.SchedulerStub(channel).ListInstances(
                        scheduler_pb2.ListInstancesRequest(), timeout=CALL_S
                    )
                except grpc.aio.AioRpcError as error:
                    problems.append(f"scheduler {address}: {error.code().name}")
                    continue
            await self._follow(listed.instances)
            return listed
        return scheduler_pb2.ListInstancesResponse()

    async def _follow(self, instances: Sequence[common_pb2.Instance]) -> None:
        names = {one.instance_id for one in instances}
        for name in [name for name in self._instances if name not in names]:
            await self._instances.pop(name).stop()
        for one in instances:
            known = self._instances.get(one.instance_id)
            if known is not None and known.instance.sidecar_address != one.sidecar_address:
                await known.stop()
                known = None
            if known is None:
                self._instances[one.instance_id] = InstanceWatch(one, self._key)
            else:
                known.instance = one

    async def _samples(self, problems: list[str]) -> MetricSamples:
        replies = await asyncio.gather(*(self._text_at(url, problems) for url in self._metrics))
        try:
            return MetricSamples.read([text for text in replies if text is not None], time.monotonic())
        except ValueError as error:
            problems.append(f"metrics: {error}")
            return MetricSamples(at_s=time.monotonic())

    async def _text_at(self, url: str, problems: list[str]) -> str | None:
        try:
            status, body = await self._client.get(
                origin_of(url.removesuffix("/metrics")), b"/metrics", within_s=CALL_S, max_bytes=MAX_METRICS_BYTES
            )
        except (ConnectionError, TimeoutError) as error:
            problems.append(f"metrics of {url}: {str(error) or 'no reply in time'}")
            return None
        if status != OK:
            problems.append(f"metrics of {url}: status {status}")
            return None
        return body.decode(errors="replace")


@asynccontextmanager
async def watching(
    schedulers: Sequence[str], metrics: Sequence[str], key: OwnKey = NO_OWN_KEY
) -> AsyncIterator[ClusterWatch]:
    """Follow a cluster while the block runs; all calls show `key`, if there is one."""
    watch = ClusterWatch(schedulers, metrics, key)
    try:
        yield watch
    finally:
        await watch.close()
