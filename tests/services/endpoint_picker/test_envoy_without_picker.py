"""A real Envoy whose picker is killed under load: it fails open, or it fails closed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from services.cluster.child import Child
from tests.services.endpoint_picker.real_envoy import Envoy, envoy
from tests.services.endpoint_picker.running import MODEL
from tests.services.gateway.stubs import completes, engines
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import run, until

pytestmark = pytest.mark.envoy

AT_A_TIME = 8
OK, FAILED, BROKEN = httpx.codes.OK, httpx.codes.INTERNAL_SERVER_ERROR, 0
CLOSED = {"failure_mode_allow: true": "failure_mode_allow: false"}


@dataclass(kw_only=True)
class Load:
    """Requests that are sent one after the other, several at a time, until the end."""

    proxy: Envoy
    statuses: list[int] = field(default_factory=list)
    by_picker: int = 0  # responses whose endpoint it chose
    is_over: bool = False

    async def send(self) -> None:
        """Send one request after the other."""
        while not self.is_over:
            try:
                response = await self.proxy.client.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"})
            except httpx.RemoteProtocolError:  # it was on its way through the picker
                self.statuses.append(BROKEN)
                continue
            self.statuses.append(response.status_code)
            self.by_picker += "x-block-instance" in response.headers

    async def until_all_are(self, status: int, num: int = 40) -> None:
        """Wait until that many responses in a row have a status."""
        start = len(self.statuses)

        def hold() -> bool:
            last = self.statuses[start:][-num:]
            return len(last) == num and set(last) == {status}

        await until(hold, what=f"{num} times {status}")


@dataclass(kw_only=True)
class Killable:
    """A picker as a process behind Envoy, under load."""

    flags: list[str]
    picker: Child
    load: Load

    async def kill(self) -> None:
        """Kill the process."""
        os.kill(self.picker.pid, signal.SIGKILL)
        await self.picker.stop()

    async def start_again(self) -> None:
        """Start another one on the same port."""
        self.picker = Child("picker", "picker", *self.flags, port=self.picker.port)
        await self.picker.start()


@asynccontextmanager
async def under_load(folder: Path, name: str, changes: dict[str, str]) -> AsyncIterator[Killable]:
    """Run everything, and send requests."""
    async with AsyncExitStack() as stack:
        stubs = await stack.enter_async_context(sidecars("a", "b", "c"))
        behind = await stack.enter_async_context(engines(completes, completes, completes))
        flags = [
            f"--instance={stub.name}={engine.url},127.0.0.1:{stub.port}"
            for stub, engine in zip(stubs, behind, strict=True)
        ]
        flags += ["--max-endpoints", "1"] if name == "original_dst" else []
        flags += ["--no-secure-serving", "--sidecar-deadline-ms", "60000", "--schedule-s", "100"]
        picker = Child("picker", "picker", *flags)
        await picker.start()
        stack.push_async_callback(picker.stop)
        ports = [engine.port for engine in behind]
        proxy = await stack.enter_async_context(envoy(folder, name, picker=picker.port, engines=ports, changes=changes))
        load = Load(proxy=proxy)
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_A_TIME):
                group.create_task(load.send())
            try:
                await load.until_all_are(OK)
                here = Killable(flags=flags, picker=picker, load=load)
                yield here
                await here.picker.stop()
            finally:
                load.is_over = True


def test_it_fails_open(tmp_path: Path) -> None:
    """Without a picker the engines serve in turn, once Envoy knows; with the next one, it chooses again."""

    async def test() -> None:
        async with under_load(tmp_path, "override_host", {}) as here:
            await here.kill()
            await here.load.until_all_are(OK)
            assert set(here.load.statuses) <= {OK, FAILED, BROKEN}
            await here.start_again()
            before = here.load.by_picker
            await until(lambda: here.load.by_picker > before + 40)

    run(test)


@pytest.mark.parametrize(("name", "changes"), [("override_host", CLOSED), ("original_dst", {})])
def test_it_fails_closed(tmp_path: Path, name: str, changes: dict[str, str]) -> None:
    """Without a picker every request fails at once, none hangs; with the next one, all succeed."""

    async def test() -> None:
        async with under_load(tmp_path, name, changes) as here:
            await here.kill()
            await here.load.until_all_are(FAILED, num=20)
            await here.start_again()
            await here.load.until_all_are(OK)

    run(test)
