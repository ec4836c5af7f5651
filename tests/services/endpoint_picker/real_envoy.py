"""A real Envoy with one of the shipped configurations."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from scripts.envoy import ENVOY, configured
from tests.ports import free_port
from tests.services.waiting import LIMIT_S, until

LOCAL = "127.0.0.1"


@dataclass(kw_only=True)
class Envoy:
    """A running Envoy and a client of it."""

    client: httpx.AsyncClient
    admin: str
    process: asyncio.subprocess.Process

    async def stat(self, name: str) -> float:
        """Read one of its counters or gauges."""
        text = (await self.client.get(f"{self.admin}/stats?filter=^{name}$")).text
        return float(text.rpartition(":")[2])


@asynccontextmanager
async def envoy(
    folder: Path,
    name: str,
    *,
    picker: int,
    engines: Sequence[int] = (),
    tls: bool = False,
    changes: Mapping[str, str] | None = None,
) -> AsyncIterator[Envoy]:
    """Run Envoy with a shipped configuration, in which texts may be changed."""
    if not ENVOY.exists():
        pytest.skip(f"needs Envoy in {ENVOY.parents[1]}: make envoy")
    port, admin = free_port(), free_port()
    file = folder / f"{name}-{port}.yaml"
    file.write_text(
        configured(name, port=port, admin=admin, picker=picker, engines=engines, tls=tls, changes=changes),
        encoding="utf-8",
    )
    with (folder / f"{name}-{port}.log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            ENVOY, "-c", file, "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning",
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with httpx.AsyncClient(base_url=f"http://{LOCAL}:{port}", timeout=LIMIT_S) as client:
                running = Envoy(client=client, admin=f"http://{LOCAL}:{admin}", process=process)
                await until(lambda: _is_live(running), what="Envoy starts")
                yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _is_live(running: Envoy) -> bool:
    assert running.process.returncode is None, "Envoy ended"
    try:
        return (await running.client.get(f"{running.admin}/ready")).status_code == 200
    except httpx.TransportError:
        return False
