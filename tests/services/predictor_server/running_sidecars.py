"""Sidecars for tests: within this process, over real gRPC on a free port, beside the state files that tests write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from predictor.config import EngineConfig
from predictor.profile import load_profile
from protos.block.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.engine_state.writer import Writer
from services.predictor_server.server import ENDLESS, running_sidecars
from services.predictor_server.service import PredictorService
from services.predictor_server.settings import SidecarSettings
from services.predictor_server.sidecar import Sidecar
from services.rpc.server import ServerSettings, serving
from tests.services.engine_state.files import CONFIG, writer_at
from tests.services.waiting import PATIENCE_S

A30 = load_profile("llama-2-7b-a30")
NAME = "one"
NEVER_S = 1e9  # as the limit of a stall, for engines that do not run
READY = common_pb2.INSTANCE_STATE_READY


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarClient:
    """A sidecar, and a gRPC client of it."""

    sidecar: Sidecar
    stub: Any
    registry: CollectorRegistry

    async def predict(self, *requests: common_pb2.Request, **fields: Any) -> predictor_pb2.PredictResponse:
        """Call Predict for some requests."""
        response: predictor_pb2.PredictResponse = await self.stub.Predict(
            predictor_pb2.PredictRequest(requests=requests, **fields)
        )
        return response

    async def forecast(self, request: common_pb2.Request) -> common_pb2.Forecast:
        """Return the forecast for one request."""
        (prediction,) = (await self.predict(request)).predictions
        assert prediction.HasField("forecast"), prediction
        return prediction.forecast

    async def reserve(self, request: common_pb2.Request, **fields: Any) -> predictor_pb2.ReserveResponse:
        """Call Reserve."""
        response: predictor_pb2.ReserveResponse = await self.stub.Reserve(
            predictor_pb2.ReserveRequest(request=request, **{"ttl_s": 60.0, **fields})
        )
        return response

    async def release(self, request_id: str) -> bool:
        """Call Release; return whether there was a reservation."""
        response = await self.stub.Release(common_pb2.ReleaseRequest(request_id=request_id))
        return bool(response.released)

    def sample(self, name: str, **labels: str) -> float:
        """Return the value of one of the sidecar's metrics."""
        return self.registry.get_sample_value(name, {"instance": NAME, **labels}) or 0.0

    async def until(self, holds: Callable[[predictor_pb2.PredictResponse], bool]) -> predictor_pb2.PredictResponse:
        """Call Predict until the response satisfies a condition."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds(response := await self.predict()):
            assert time.monotonic() < deadline_s, response
            await asyncio.sleep(0.005)
        return response


def request(
    request_id: str = "r", prompt_tokens: int = 20, output_tokens: int = 10, **fields: Any
) -> common_pb2.Request:
    """Make a request whose length is known."""
    return common_pb2.Request(
        request_id=request_id, prompt_tokens=prompt_tokens, max_tokens=output_tokens, ignore_eos=True, **fields
    )


def idle_engine(path: Path, config: EngineConfig = CONFIG) -> Writer:
    """Write the state file of an engine without requests."""
    writer = writer_at(path, config)
    writer.blocks["reuse"] = np.arange(1, 33)
    writer.publish()
    return writer


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClient:
    """The sidecars of one node, and a gRPC client of them."""

    sidecars: list[Sidecar]
    stub: Any
    registry: CollectorRegistry
    port: int


@asynccontextmanager
async def node_of(state_files: Mapping[str, object], **settings: Any) -> AsyncIterator[NodeClient]:
    """Run a sidecar for each state file, all in one server."""
    engines = [
        SidecarSettings(**{"instance_id": name, "state_file": str(file), "fresh_s": 0.0, **settings})
        for name, file in state_files.items()
    ]
    registry = CollectorRegistry()
    async with running_sidecars(engines, A30, registry) as sidecars:
        register = partial(predictor_pb2_grpc.add_PredictorServicer_to_server, PredictorService(sidecars))
        async with (
            serving(ServerSettings(drain_s=1.0), [register], registry, endless=ENDLESS) as here,
            grpc.aio.insecure_channel(f"127.0.0.1:{here.port}") as channel,
        ):
            stub = predictor_pb2_grpc.PredictorStub(channel)
            yield NodeClient(sidecars=sidecars, stub=stub, registry=registry, port=here.port)


@asynccontextmanager
async def sidecar_of(state_file: object, **settings: Any) -> AsyncIterator[SidecarClient]:
    """Run a sidecar for one state file."""
    async with node_of({NAME: state_file}, **settings) as node:
        yield SidecarClient(sidecar=node.sidecars[0], stub=node.stub, registry=node.registry)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run an asynchronous test with a limit on its time."""

    async def limited() -> None:
        async with asyncio.timeout(4 * PATIENCE_S):
            await test

    asyncio.run(limited())
