"""The clients of a chaos run: each sends one request, and says how it ended."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any
from uuid import uuid4

import grpc

from protos.block.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from scripts.chaos.cluster import ChaosCluster
from scripts.chaos.plan import ChaosSettings
from scripts.chaos.requests import COMPLETE, ERROR_EVENT, GENERATE, ChaosRequest, compared, judged, requests_of
from services.cluster.child import Child
from services.http.client import HttpClient
from services.http.connection import ConnectError, Connection
from services.http.headers import request_head
from services.http.origin import origin_of
from services.rpc.channels import open_channel

TIMEOUT_S = 120.0
REFUSED_S = 10.0  # for which a client tries to connect
PAUSE_S = 0.2
NUM_SAMPLES, SAMPLE_CHARACTERS = 3, 400
MIGRATED = b": x-block-migrations:"
LEFT = "left"
NOT_CONTINUED = "not continued: "  # and the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnd:
    """How a request ended, as its client saw it."""

    request_id: str
    kind: str
    end: str
    start_s: float
    end_s: float
    sent_to: str = ""  # a gateway or a scheduler
    policy: str = ""  # that placed it
    num_migrations: int = 0
    longest_pause_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class ClientRecord:
    """What all clients saw."""

    ends: list[RequestEnd] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # of replies that are wrong
    num_under_way: int = 0

    def add(self, end: RequestEnd, detail: str) -> None:
        """Count a request that has ended."""
        self.ends.append(end)
        self.counts[end.end] += 1
        if end.end not in (COMPLETE, LEFT) and len(self.samples[end.end]) < NUM_SAMPLES:
            about = f"{end.kind} {end.request_id} at {end.sent_to} after {end.end_s - end.start_s:.2f} s"
            self.samples[end.end].append(f"{about}: {detail[-SAMPLE_CHARACTERS:]}")


@dataclass(slots=True, kw_only=True)
class Clients:
    """Sends the load to gateways in turn, and a part of it to schedulers by gRPC."""

    cluster: ChaosCluster
    settings: ChaosSettings
    record: ClientRecord
    _http: HttpClient = field(default_factory=lambda: HttpClient(connect_s=5.0, max_kept=256))

    async def run(self) -> None:
        """Send requests at a rate until the time is over, and wait for all of them."""
        draw = random.Random(f"arrivals {self.settings.seed}")
        due_s = time.monotonic()
        end_s = due_s + 60.0 * self.settings.minutes
        requests = requests_of(self.settings)
        schedulers = self.cluster.of_kind("scheduler")
        channels = [open_channel(self.cluster.address_of(child.name)) for child in schedulers]
        stubs = [scheduler_pb2_grpc.SchedulerStub(channel) for channel in channels]
        try:
            async with asyncio.TaskGroup() as tasks:
                while due_s < end_s:
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                    tasks.create_task(self._answered(next(requests), stubs))
                    due_s += draw.expovariate(self.settings.rate)
        finally:
            self._http.close()
            for channel in channels:
                await channel.close()

    async def _answered(self, request: ChaosRequest, stubs: Sequence[scheduler_pb2_grpc.SchedulerStub]) -> None:
        self.record.num_under_way += 1
        course = RequestCourse(request=request)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if request.kind == GENERATE:
                    await course.generate(stubs)
                else:
                    await course.post(self._http, self.cluster.of_kind("gateway"))
        except TimeoutError:
            course.end = "no end in time"
        finally:
            self.record.num_under_way -= 1
        self.record.add(course.ended(), course.detail)


@dataclass(slots=True, kw_only=True)
class RequestCourse:
    """The course of one request."""

    request: ChaosRequest
    request_id: str = field(default_factory=lambda: uuid4().hex)
    end: str = ""
    detail: str = ""
    sent_to: str = ""
    policy: str = ""
    _start_s: float = field(default_factory=time.monotonic)
    _received: bytearray = field(default_factory=bytearray)
    _times_s: list[float] = field(default_factory=list)

    def ended(self) -> RequestEnd:
        """Return how it ended."""
        pauses_s = (later - earlier for earlier, later in pairwise(self._times_s))
        return RequestEnd(
            request_id=self.request_id,
            kind=self.request.kind,
            end=self.end,
            start_s=self._start_s,
            end_s=time.monotonic(),
            sent_to=self.sent_to,
            policy=self.policy,
            num_migrations=self._received.count(MIGRATED),
            longest_pause_s=max(pauses_s, default=0.0),
        )

    # HTTP.

    async def post(self, http: HttpClient, gateways: Sequence[Child]) -> None:
        """Send the request to the first gateway that accepts a connection; nothing is sent twice."""
        until_s = time.monotonic() + REFUSED_S
        place = self.request.number
        while True:
            gateway = gateways[place % len(gateways)]
            try:
                connection = await self._sent(http, gateway)
                break
            except ConnectError as error:  # nothing has been sent
                self.detail = str(error)
                place += 1
                if time.monotonic() > until_s:
                    self.end = "unreachable"
                    return
                if place % len(gateways) == self.request.number % len(gateways):
                    await asyncio.sleep(PAUSE_S)
            except (ConnectionError, TimeoutError) as error:
                self.end, self.detail = f"no reply: {type(error).__name__}", str(error)
                return
        try:
            await self._read(connection)
        except (ConnectionError, TimeoutError) as error:
            self.end, self.detail = f"broken: {type(error).__name__}", str(error)
        finally:
            connection.release()

    async def _sent(self, http: HttpClient, gateway: Child) -> Connection:
        self.sent_to = gateway.name
        origin = origin_of(f"http://127.0.0.1:{gateway.port}")
        body = json.dumps(self.request.body).encode()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", self.request_id.encode())]
        path = b"/v1/chat/completions" if self.request.is_chat else b"/v1/completions"
        return await http.send(origin, request_head(b"POST", origin, path, headers, len(body)), body, TIMEOUT_S)

    async def _read(self, connection: Connection) -> None:
        request = self.request
        self.policy = dict(connection.headers).get(b"x-block-policy", b"").decode()
        while piece := await connection.read(TIMEOUT_S):
            self._received += piece
            self._times_s.append(time.monotonic())
            if request.leaves_after is not None and self._received.count(b"data: ") > request.leaves_after:
                self.end = LEFT
                return
        received = bytes(self._received)
        self.detail = received.decode(errors="replace")
        if connection.status != 200:
            self.end = f"status {connection.status}"
            return
        self.end = judged(received, request)
        if self.end == ERROR_EVENT and (why := request.why_not_continuable):
            self.end = NOT_CONTINUED + why

    # gRPC.

    async def generate(self, stubs: Sequence[scheduler_pb2_grpc.SchedulerStub]) -> None:
        """Have a scheduler send the request; another one is asked while no part of the answer has come."""
        until_s = time.monotonic() + REFUSED_S
        body = self.request.body
        facts = common_pb2.Request(
            request_id=self.request_id, model=body["model"], max_tokens=body["max_tokens"], ignore_eos=True
        )
        message = scheduler_pb2.GenerateRequest(request=facts, prompt=body["prompt"])
        texts: list[str] = []
        for place in count(self.request.number):
            self.sent_to = f"scheduler-{place % len(stubs)}"
            try:
                await self._streamed(stubs[place % len(stubs)], message, texts)
            except grpc.aio.AioRpcError as error:
                self.detail = f"{error.code().name}: {error.details()}"
                if texts or time.monotonic() > until_s:
                    self.end = f"generate: {error.code().name}"
                    return
                await asyncio.sleep(PAUSE_S)
            else:
                return

    async def _streamed(
        self, stub: scheduler_pb2_grpc.SchedulerStub, message: scheduler_pb2.GenerateRequest, texts: list[str]
    ) -> None:
        usage: list[int] = []
        stream: Any = stub.Generate(message, timeout=TIMEOUT_S)
        async with aclosing(stream) as events:
            async for event in events:
                if event.HasField("decision"):
                    self.policy = event.decision.policy
                elif event.HasField("chunk"):
                    texts.append(event.chunk.text)
                    self._times_s.append(time.monotonic())
                elif event.HasField("outcome"):
                    usage.append(event.outcome.output_tokens)
        self.end = compared("".join(texts), usage, self.request)
        self.detail = "".join(texts)
