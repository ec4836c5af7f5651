"""`block up --tls`: every port of every part, commands that call them, and renewed certificates under a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.security.development_ca import write_certificates
from services.security.parts import LOCAL_NAMES, PARTS
from tests.services.cli.running import block
from tests.services.waiting import PATIENCE_S, PATIENT_SERVERS, run, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]
LIMIT_S = 400.0
TABLES = """
[cluster]
port = 0
[engine]
profile = "llama-2-7b-a30"
served-model-name = "tiny"
max-num-seqs = 8
max-model-len = 512
num-gpu-blocks = 49
[predictor]
metrics-port = 0
{more}
[scheduler]
metrics-port = 0
[tagger]
metrics-port = 0
"""


class UpCommand:
    """A running `block up`, and what it printed."""

    def __init__(self, folder: Path, process: asyncio.subprocess.Process) -> None:
        """Read its output until it ends."""
        self.tls = folder / "cluster" / "tls"
        self.lines: list[str] = []
        self._process = process
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self.lines.append(line.decode().strip())

    @property
    def url(self) -> str:
        """The URL of the gateway, once it is printed."""
        return next((line.split()[1] for line in self.lines if line.startswith("block: http")), "")

    def ports(self) -> dict[str, int]:
        """Each port, by the part and what it is for."""
        found = {}
        for line in self.lines:
            part = re.search(r"part=(\S+)", line)
            if part is not None and (" serving " in line or " proxying " in line):
                kind = "proxy" if " proxying " in line else ""
                for name, port in re.findall(r"(\w*port)=(\d+)", line):
                    found[f"{part[1]} {kind}{name}"] = int(port)
        return found

    async def stop(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await self._process.wait()
        await self._reading


@asynccontextmanager
async def up(folder: Path, *flags: str, more: str = "") -> AsyncIterator[UpCommand]:
    """Run `block up --tls`."""
    (folder / "block.toml").write_text(TABLES.format(more=more))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "up", "--config", str(folder / "block.toml"), "--tls",
        "--folder", str(folder / "cluster"), *flags, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **PATIENT_SERVERS},
    )  # fmt: skip
    command = UpCommand(folder, process)
    try:
        await until(lambda: bool(command.url) or process.returncode is not None, LIMIT_S)
        assert command.url, "\n".join(command.lines)
        yield command
    finally:
        await command.stop()


def handshake(port: int, context: ssl.SSLContext) -> None:
    """Connect with TLS, and wait for the first byte, which shows whether the server accepts the client."""
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        secured.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        if not secured.recv(1):
            raise ConnectionResetError


def plain_reply(port: int) -> bytes:
    """Send plain HTTP, and return what comes back."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        try:
            return plain.recv(1000)
        except OSError:
            return b""


def context_of(folder: Path, part: str = "") -> ssl.SSLContext:
    """Make a context with the CA, and with a part's certificate."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    if part:
        context.load_cert_chain(folder / f"{part}.crt", folder / f"{part}.key")
    return context


@pytest.mark.parametrize("mirror", [False, True])
def test_every_port_has_tls(tmp_path: Path, *, mirror: bool) -> None:
    """Without a certificate only the gateway serves; a completion passes, and its stream survives new certificates."""

    async def test() -> None:
        flags = ("--instances", "1", "--schedulers", "1", *(("--mirror",) if mirror else ()))
        more = 'profile = "llama-2-7b-a30"' if mirror else ""
        async with up(tmp_path, *flags, more=more) as cluster:
            ports = cluster.ports()
            assert len(ports) >= 8 + mirror, ports
            for name, port in ports.items():
                assert b"HTTP/1.1" not in await asyncio.to_thread(plain_reply, port), name
                is_grpc = name.endswith(" port") and name.split("-")[0] not in {"engine", "gateway"}
                if not is_grpc:
                    await asyncio.to_thread(handshake, port, context_of(cluster.tls, "client"))
                if name.startswith("gateway"):
                    await asyncio.to_thread(handshake, port, context_of(cluster.tls))
                else:
                    with pytest.raises((ssl.SSLError, ConnectionResetError)):
                        await asyncio.to_thread(handshake, port, context_of(cluster.tls))
            identity = (
                "--tls-ca", f"{cluster.tls}/ca.crt", "--tls-cert", f"{cluster.tls}/client.crt",
                "--tls-key", f"{cluster.tls}/client.key",
            )  # fmt: skip
            address = f"127.0.0.1:{ports['scheduler-block-0 port']}"
            done = await asyncio.to_thread(block, "policies", "show", "--scheduler", address, *identity)
            assert (done.returncode, "engine-0" in done.stdout) == (0, True), done.stderr
            operator = f"https://127.0.0.1:{ports['scheduler-block-0 metrics_port']}"
            done = await asyncio.to_thread(block, "instances", "list", "--operator", operator, *identity)
            assert (done.returncode, "engine-0" in done.stdout) == (0, True), done.stderr
            async with httpx.AsyncClient(verify=context_of(cluster.tls), timeout=PATIENCE_S) as client:
                body = {"model": "tiny", "prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
                events = 0
                async with client.stream("POST", f"{cluster.url}/completions", json=body) as reply:
                    assert reply.status_code == 200
                    assert reply.headers["x-block-instance"] == "engine-0"
                    async for line in reply.aiter_lines():
                        events += line.startswith("data: {")
                        if events == 1:
                            write_certificates(cluster.tls, set(PARTS) - {"picker"}, LOCAL_NAMES, force=True)
                    assert events >= 200

            async def served_by_new_ones() -> bool:
                async with httpx.AsyncClient(verify=context_of(cluster.tls), timeout=PATIENCE_S) as fresh:
                    reply = await fresh.post(f"{cluster.url}/completions", json={**body, "stream": False})
                    assert reply.status_code == 200
                    assert json.loads(reply.content)["usage"]["completion_tokens"] == 200
                return any("certificates are read again part=gateway-block" in line for line in cluster.lines)

            await until(served_by_new_ones)

    run(test, LIMIT_S)


def test_a_provisioner_starts_instances_with_tls(tmp_path: Path) -> None:
    """Its engines have https:// URLs, and their sidecars accept the gateway."""

    async def test() -> None:
        async with (
            up(tmp_path, "--provision", "1-2") as cluster,
            httpx.AsyncClient(verify=context_of(cluster.tls), timeout=PATIENCE_S) as client,
        ):
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
            reply = await client.post(f"{cluster.url}/completions", json=body)
            assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 3)

    run(test, LIMIT_S)
