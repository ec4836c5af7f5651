"""Links that fail, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from scripts.chaos.links import HEALTHY, FailingLink, LinkCondition
from tests.services.waiting import PATIENCE_S, run

Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Exchange = Callable[[FailingLink, Connected], Awaitable[None]]


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back what comes, and close at the end."""
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def linked() -> AsyncIterator[FailingLink]:
    """Run a link to a server that echoes."""
    server = await asyncio.start_server(echoed, "127.0.0.1", 0)
    link = FailingLink(lambda: server.sockets[0].getsockname()[1])
    await link.start()
    try:
        yield link
    finally:
        await link.stop()
        server.close()


def exchanged(exchange: Exchange) -> None:
    """Run an exchange over one connection of a link."""

    async def all_of_it() -> None:
        async with linked() as link:
            reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
            try:
                await exchange(link, (reader, writer))
            finally:
                writer.close()

    run(all_of_it)


async def echo(connected: Connected, data: bytes) -> float:
    """Send data, wait for all of it to come back, and return how long that took."""
    reader, writer = connected
    start_s = time.monotonic()
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    return time.monotonic() - start_s


def test_a_healthy_link_passes_everything_and_the_end() -> None:
    """Much data, and then the end of one direction."""

    async def exchange(_: FailingLink, connected: Connected) -> None:
        await echo(connected, bytes(range(256)) * 4096)
        connected[1].write_eof()
        assert await connected[0].read() == b""

    exchanged(exchange)


def test_a_delay_counts_in_each_direction() -> None:
    """What has come before the delay ends is delayed as well."""

    async def exchange(link: FailingLink, connected: Connected) -> None:
        link.set(LinkCondition(delay_s=0.05))
        assert await echo(connected, b"late") >= 0.1

    exchanged(exchange)


def test_a_narrow_link_takes_its_time() -> None:
    """By its bandwidth."""

    async def exchange(link: FailingLink, connected: Connected) -> None:
        link.set(LinkCondition(bytes_per_s=100_000.0))
        assert await echo(connected, bytes(10_000)) >= 0.1

    exchanged(exchange)


def test_a_stalled_link_passes_nothing_until_it_recovers() -> None:
    """Nothing is lost meanwhile."""

    async def exchange(link: FailingLink, connected: Connected) -> None:
        link.set(LinkCondition(stalled=True))
        echoing = asyncio.create_task(echo(connected, b"held"))
        done, _ = await asyncio.wait([echoing], timeout=0.1)
        assert not done
        link.set(HEALTHY)
        async with asyncio.timeout(PATIENCE_S):
            await echoing

    exchanged(exchange)


def test_a_reset_is_seen_by_the_client() -> None:
    """As a connection that is reset, not as the end of the data."""

    async def exchange(link: FailingLink, connected: Connected) -> None:
        await echo(connected, b"before")
        link.reset()
        with pytest.raises(ConnectionResetError):
            await connected[0].read()

    exchanged(exchange)


def test_a_target_that_is_gone_resets_the_connection() -> None:
    """Clients see that nothing came through."""

    async def all_of_it() -> None:
        link = FailingLink(lambda: 1)
        await link.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        await link.stop()

    run(all_of_it)
