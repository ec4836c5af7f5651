"""A gateway with a live page, and what a page reads of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.gateway.server import InProcessDecisions, serving
from services.gateway.settings import GatewaySettings
from services.instances.sources import Listed
from services.placement.settings import SchedulerSettings
from services.rpc.settings import ServerSettings
from services.security.access_settings import AccessSettings
from tests.services.gateway.stubs import LOCAL, completes, engines
from tests.services.security.key_files import key_file
from tests.services.stub_sidecars import StubSidecar, sidecars
from tests.services.waiting import LIMIT_S, PATIENCE_S

MODEL = "tiny"


@dataclass(kw_only=True)
class Paged:
    """A gateway with two stub sidecars and two stub engines."""

    client: httpx.AsyncClient
    sidecars: list[StubSidecar]

    async def post(self, request_id: str, **headers: str) -> httpx.Response:
        """Send a completion."""
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 5}
        return await self.client.post("/v1/completions", json=body, headers={"x-request-id": request_id, **headers})

    @asynccontextmanager
    async def tail(self, **headers: str) -> AsyncIterator[TailOfPage]:
        """Read the stream of events as the page does."""
        async with self.client.stream("GET", "/ui/tail", headers=headers) as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream"
            yield TailOfPage(lines=response.aiter_lines())


@dataclass(kw_only=True)
class TailOfPage:
    """Frames as they come."""

    lines: AsyncIterator[str]
    frames: list[dict[str, Any]] = field(default_factory=list)

    async def next(self) -> dict[str, Any]:
        """Return the next frame."""
        async for line in self.lines:
            if line.startswith("data: "):
                frame: dict[str, Any] = json.loads(line.removeprefix("data: "))
                self.frames.append(frame)
                return frame
        raise EOFError

    async def until(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Read until a frame satisfies a condition; return it."""
        while True:
            frame = await self.next()
            if holds(frame):
                return frame


def has(part: str, request_id: str) -> Callable[[dict[str, Any]], bool]:
    """Return a condition: the request is in this part of a frame."""
    return lambda frame: any(one["id"] == request_id for one in frame.get(part, ()))


@asynccontextmanager
async def paged(*, keys: Sequence[str] = (), drain_s: float = 1.0, **scheduler: Any) -> AsyncIterator[Paged]:
    """Run a gateway that decides by itself."""
    async with AsyncExitStack() as stack:
        stubs = await stack.enter_async_context(sidecars("a", "b"))
        behind = await stack.enter_async_context(engines(completes, completes))
        for stub, engine in zip(stubs, behind, strict=True):
            stub.engine_url, stub.models = engine.url, (MODEL,)
        stubs[1].e2e_s = 9.0
        decisions = InProcessDecisions(
            settings=SchedulerSettings(**{"scheduler_id": "own", "sidecar_deadline_s": PATIENCE_S, **scheduler}),
            source=Listed([stub.instance for stub in stubs]),
        )
        settings = GatewaySettings(decide="in-process", schedule_s=2 * PATIENCE_S)
        access = AccessSettings(api_key_file=stack.enter_context(key_file(*keys)))
        server = ServerSettings(drain_s=drain_s, access=access)
        here = await stack.enter_async_context(serving(settings, server, decisions))
        client = httpx.AsyncClient(base_url=f"http://{LOCAL}:{here.port}", timeout=LIMIT_S)
        yield Paged(client=await stack.enter_async_context(client), sidecars=stubs)
