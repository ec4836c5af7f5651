"""The gateway as a process: start, bad command lines, and shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.services.cli.running import block, refusal
from tests.services.gateway.stubs import LOCAL, STREAM, Call, completes, engines
from tests.services.waiting import LIMIT_S, run

BLOCK = str(Path(sys.executable).with_name("block"))
ASKING = {"model": "tiny", "prompt": "Say hello", "stream": True}


@asynccontextmanager
async def gateway(*flags: str, **environment: str) -> AsyncIterator[tuple[Process, int]]:
    """Run a gateway without schedulers; yields its process and its port."""
    process = await asyncio.create_subprocess_exec(
        BLOCK, "serve", "gateway", "--port", "0", "--scheduler", "", "--log-format", "json", *flags,
        stdout=PIPE, stderr=PIPE, env={**os.environ, **environment},
    )  # fmt: skip
    try:
        yield process, int((await line(process, "serving"))["port"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line(process: Process, event: str) -> dict[str, str]:
    """Read the log up to an event."""
    assert process.stderr is not None
    while text := await process.stderr.readline():
        said: dict[str, str] = json.loads(text)
        if said["event"] == event:
            return said
    raise AssertionError(f"the gateway ended before {event}")


def test_streams_finish_after_sigterm() -> None:
    """After SIGTERM the gateway refuses new requests, lets the stream under way end, and exits with status 0."""
    go_on = asyncio.Event()

    async def answer(call: Call) -> None:
        call.stream()
        await call.chunk(STREAM[0])
        await go_on.wait()
        for piece in STREAM[1:]:
            await call.chunk(piece)
        call.end()

    async def test() -> None:
        async with (
            engines(answer) as (engine,),
            gateway("--engine-url", engine.url) as (process, port),
            httpx.AsyncClient(base_url=f"http://{LOCAL}:{port}", timeout=LIMIT_S) as client,
            client.stream("POST", "/v1/completions", json=ASKING) as response,
        ):
            pieces = response.aiter_raw()
            received = await anext(pieces)
            process.send_signal(signal.SIGTERM)
            await line(process, "draining")
            while await listens(port):
                pass
            go_on.set()
            async for piece in pieces:
                received += piece
            assert received == b"".join(STREAM)
            await line(process, "stopped")
            assert await process.wait() == 0

    run(test)


async def listens(port: int) -> bool:
    """Tell whether a server accepts connections."""
    try:
        _, writer = await asyncio.open_connection(LOCAL, port)
    except ConnectionError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def test_streams_that_do_not_finish_are_cut_off() -> None:
    """After --drain-s the requests under way end with an error that clients can read, and engines are disconnected."""
    gone = asyncio.Event()

    async def answer(call: Call) -> None:
        call.stream()
        await call.chunk(STREAM[0])
        await call.left()
        gone.set()

    async def test() -> None:
        async with (
            engines(answer) as (engine,),
            gateway("--engine-url", engine.url, "--drain-s", "0.1") as (process, port),
            httpx.AsyncClient(base_url=f"http://{LOCAL}:{port}", timeout=LIMIT_S) as client,
            client.stream("POST", "/v1/completions", json=ASKING) as response,
        ):
            pieces = response.aiter_raw()
            received = await anext(pieces)
            process.send_signal(signal.SIGTERM)
            async for piece in pieces:
                received += piece
            first, error, _ = received.split(b"\n\n")
            assert first + b"\n\n" == STREAM[0]
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "unavailable"
            await gone.wait()
            assert await process.wait() == 0

    run(test)


def test_flags_environment_and_file(tmp_path: Path) -> None:
    """Lists are given by repeated flags, with commas, in the environment, or in a file."""
    file = tmp_path / "block.toml"

    async def test() -> None:
        async with engines(completes) as (engine,):
            file.write_text(f'[gateway]\nengine-url = ["{engine.url}"]\nmodel = ["a", "b"]\nmax-concurrency = 7\n')
            async with (
                gateway("--config", str(file), BLOCK_GATEWAY_API_KEY="k1,k2") as (_, port),
                httpx.AsyncClient(
                    base_url=f"http://{LOCAL}:{port}", headers={"authorization": "Bearer k2"}, timeout=LIMIT_S
                ) as client,
            ):
                models = (await client.get("/v1/models")).json()["data"]
                assert [model["id"] for model in models] == ["a", "b"]
                assert (await client.post("/v1/completions", json={"model": "a", "prompt": "x"})).status_code == 200

    run(test)


BAD_FLAGS = (
    (["--first-byte-s", "-1"], "first_byte_s: must be a number above 0"),
    (["--scheduler", "nowhere"], "scheduler: 'nowhere' must be host:port"),
    (["--scheduler", ""], "scheduler: name at least one"),
    (["--engine-url", "x"], "engine_url: 'x'"),
    (["--api-key-file", "/nowhere"], "/nowhere: cannot be read"),
    (["--host", "no such host", "--insecure"], "host: 'no such host' is no address"),
    (["--prot", "1"], "--prot"),
)


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS)
def test_bad_flags(flags: list[str], message: str) -> None:
    """A bad value is one line that names the flag, and status 2."""
    assert message in refusal("serve", "gateway", "--port", "0", *flags)


def test_a_port_in_use() -> None:
    """A used port is one line and status 2."""
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port: {port} on 127.0.0.1 is in use" in refusal("serve", "gateway", "--port", str(port))


def test_a_file_with_an_unknown_key(tmp_path: Path) -> None:
    """An unknown key is refused, with the most similar one."""
    file = tmp_path / "block.toml"
    file.write_text("[gateway]\nschedulr = 'a:1'\n")
    assert "did you mean scheduler?" in refusal("serve", "gateway", "--config", str(file))


def test_help() -> None:
    """The help lists the flags and their variables."""
    assert "--engine-url" in block("serve", "gateway", "--help").stdout
