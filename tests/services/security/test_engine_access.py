"""A gateway before an engine with https:// and an API key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.gateway.server import serving
from services.gateway.settings import GatewaySettings
from services.http.application import Application, Call
from services.http.client import HttpClient
from services.http.headers import request_head
from services.http.origin import origin_of
from services.http.server import answering, listening
from services.rpc.settings import ServerSettings
from services.security.access_settings import AccessSettings
from services.security.certificates import Certificates, use_tls
from services.security.settings import NO_TLS, EngineAccessSettings, TlsSettings
from tests.services.security.authorities import Authority, run_on

WITHIN_S = 60.0
BODY = b'{"model": "tiny", "prompt": "Hello", "max_tokens": 1}'


class KeyedEngine(Application):
    """Replies to who has the key, and notes every Authorization header."""

    def __init__(self) -> None:
        """Serve completions."""
        super().__init__()
        self.routes = {"/v1/completions": {"POST": self._complete}}
        self.seen: list[list[bytes]] = []

    async def _complete(self, call: Call) -> None:
        await self.body_of(call, 1000)
        self.seen.append([value for name, value in call.headers if name == b"authorization"])
        await call.reply(200, [(b"content-type", b"application/json")], json.dumps({"choices": []}).encode())


@pytest.fixture
def own_settings() -> Iterator[None]:
    """The settings of this process are as before after the test."""
    yield
    use_tls(NO_TLS)


@pytest.mark.usefixtures("own_settings")
def test_the_gateway_reaches_an_engine_with_tls_and_a_key(tmp_path: Path) -> None:
    """Its CA verifies the engine, it presents its certificate, and sends the engine's key in place of the client's."""
    public, inner = Authority(folder=tmp_path / "public"), Authority(folder=tmp_path / "inner")
    public.issue("gateway")
    inner.issue("gateway")
    inner.issue("engine")
    key_file = tmp_path / "key"
    key_file.write_text("engines-only\n")
    tls = TlsSettings(
        tls_cert=str(public.folder / "gateway.crt"), tls_key=str(public.folder / "gateway.key"),
        tls_client_cert=str(inner.folder / "gateway.crt"), tls_client_key=str(inner.folder / "gateway.key"),
    )  # fmt: skip
    use_tls(tls, EngineAccessSettings(engine_ca=str(inner.ca_file), engine_api_key_file=str(key_file)))

    async def test() -> None:
        engine = KeyedEngine()
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(listening("127.0.0.1", 0))
            engine_tls = Certificates(inner.settings("engine", peers=["gateway.test"]))
            await stack.enter_async_context(answering(engine, listener, 1.0, tls=engine_tls.server_context))
            settings = GatewaySettings(
                engine_urls=(f"https://127.0.0.1:{listener.getsockname()[1]}",), connect_s=WITHIN_S
            )
            gateway = await stack.enter_async_context(
                serving(
                    settings,
                    ServerSettings(drain_s=1.0, tls=tls, access=AccessSettings(plain_keys=("clients-only",))),
                )
            )
            client = HttpClient(tls=Certificates(TlsSettings(tls_ca=str(public.ca_file))).http_context)
            stack.callback(client.close)
            origin = origin_of(f"https://localhost:{gateway.port}")
            headers = [(b"authorization", b"Bearer clients-only"), (b"content-type", b"application/json")]
            head = request_head(b"POST", origin, b"/v1/completions", headers, len(BODY))
            reply = await client.send(origin, head, BODY, WITHIN_S)
            text = await reply.read_all(WITHIN_S, 10_000)
            assert (reply.status, engine.seen) == (200, [[b"Bearer engines-only"]]), text
            assert engine_tls.handshakes.counts == {}

    run_on("uvloop", test)
