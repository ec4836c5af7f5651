"""HTTP servers and clients with TLS, over real sockets: what is refused, and what each side says about it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.http.application import Application, Call
from services.http.client import HttpClient
from services.http.connection import BrokenError, ConnectError
from services.http.limits import HttpLimits
from services.http.origin import origin_of
from services.http.server import answering, listening
from services.security.certificates import Certificates
from services.security.settings import TlsSettings
from tests.services.security.authorities import Authority, run_on
from tests.services.waiting import until

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
WITHIN_S = 20.0


class Greeter(Application):
    """Replies with the scheme of the request."""

    def __init__(self) -> None:
        """Serve one path."""
        super().__init__()
        self.routes = {"/": {"GET": self._greet}}

    async def _greet(self, call: Call) -> None:
        await call.reply(200, [], str(call.scope["scheme"]).encode())


@asynccontextmanager
async def server(tls: TlsSettings) -> AsyncIterator[tuple[int, Certificates]]:
    """Run a server; yield its port and its certificates."""
    certificates = Certificates(tls)
    with listening("127.0.0.1", 0) as listener:
        async with answering(Greeter(), listener, 1.0, tls=certificates.server_context):
            yield listener.getsockname()[1], certificates


async def get(port: int, certificates: Certificates, *, scheme: str = "https", host: str = "localhost") -> str:
    """Get the page of a server."""
    client = HttpClient(tls=certificates.http_context, connect_s=WITHIN_S)
    try:
        status, body = await client.get(origin_of(f"{scheme}://{host}:{port}"), b"/", within_s=WITHIN_S)
    finally:
        client.close()
    assert status == 200
    return body.decode()


@LOOPS
def test_a_client_that_does_not_complete_its_handshake_is_disconnected(tmp_path: Path, loop: str) -> None:
    """A handshake has the time of a request's head, whether nothing arrives or a part of it."""
    ca = Authority(folder=tmp_path)
    ca.issue("server")

    async def test() -> None:
        app = Greeter()
        app.limits = HttpLimits(header_s=0.2)
        with listening("127.0.0.1", 0) as listener:
            async with answering(app, listener, 1.0, tls=Certificates(ca.settings("server")).server_context):
                for sent in (b"", b"\x16\x03\x01\x02\x00\x01"):
                    reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
                    writer.write(sent)
                    async with asyncio.timeout(WITHIN_S):
                        with contextlib.suppress(ConnectionError):
                            assert await reader.read() == b""
                    writer.close()

    run_on(loop, test)


def test_names_are_checked_where_clients_need_a_certificate(tmp_path: Path) -> None:
    """With --tls-client-auth none, --tls-peer is for servers only: a client without a certificate is served."""
    ca = Authority(folder=tmp_path)
    ca.issue("server")

    async def test() -> None:
        async with server(ca.settings("server", peers=["server.test"], tls_client_auth="none")) as (port, _):
            assert await get(port, Certificates(ca.settings())) == "https"

    run_on("asyncio", test)


@LOOPS
def test_both_sides_present_certificates(tmp_path: Path, loop: str) -> None:
    """A request passes where each side knows the CA of the other."""
    ca = Authority(folder=tmp_path)
    ca.issue("server")
    ca.issue("client")

    async def test() -> None:
        async with server(ca.settings("server")) as (port, certificates):
            assert await get(port, Certificates(ca.settings("client"))) == "https"
            assert await get(port, Certificates(ca.settings("client")), host="127.0.0.1") == "https"
            assert certificates.handshakes.counts == {}

    run_on(loop, test)


@LOOPS
@pytest.mark.parametrize(
    ("days", "names", "signer", "reason", "text"),
    [
        (-1.0, (), None, "expired", "has expired"),
        (1.0, ("elsewhere.test",), None, "wrong_name", "another name"),
        (1.0, ("127.0.0.2",), None, "wrong_name", "another"),
        (1.0, (), "other", "unknown_ca", "not in the CA file"),
    ],
)
def test_a_client_refuses_a_server(
    tmp_path: Path, loop: str, days: float, names: tuple[str, ...], signer: str | None, reason: str, text: str
) -> None:
    """The error of the request names the address, and what is wrong with the certificate."""
    ca = Authority(folder=tmp_path)
    other = Authority(folder=tmp_path / "other")
    ca.issue("server", *names, days=days, signed_by=other.pair if signer else None)

    async def test() -> None:
        async with server(ca.settings("server", tls_client_auth="none")) as (port, _):
            client = Certificates(ca.settings())
            with pytest.raises(ConnectError) as refused:
                await get(port, client)
            assert f"localhost:{port} cannot be reached: the server's certificate" in str(refused.value)
            assert text in str(refused.value)
            assert client.handshakes.counts == {("client", reason): 1}

    run_on(loop, test)


@LOOPS
@pytest.mark.parametrize(
    ("case", "reason", "server_text", "client_text"),
    [
        ("none", "no_client_certificate", "the client presents no certificate", "requires a client certificate"),
        ("other", "unknown_ca", "the client's certificate is signed by a CA", "does not know the CA"),
        ("expired", "expired", "the client's certificate has expired", "certificate has expired"),
        ("name", "not_allowed", "the client's certificate is for client.test", ""),
    ],
)
def test_a_server_refuses_a_client(
    tmp_path: Path,
    loop: str,
    case: str,
    reason: str,
    server_text: str,
    client_text: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server logs and counts why, and the client learns it by an alert."""
    ca, other = Authority(folder=tmp_path), Authority(folder=tmp_path / "other")
    ca.issue("server")
    ca.issue("client", days=-1.0 if case == "expired" else 1.0, signed_by=other.pair if case == "other" else None)
    peers = ("friend.test",) if case == "name" else ()

    async def test() -> None:
        async with server(ca.settings("server", peers=peers)) as (port, certificates):
            with pytest.raises((ConnectError, BrokenError)) as refused:
                await get(port, Certificates(ca.settings("" if case == "none" else "client")))
            assert client_text in str(refused.value)
            await until(lambda: certificates.handshakes.counts == {("server", reason): 1})
            assert any(server_text in record.message for record in caplog.records)

    with caplog.at_level(logging.WARNING):
        run_on(loop, test)


@LOOPS
def test_plain_text_sent_to_a_tls_port(tmp_path: Path, loop: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused, logged once and counted each time; TLS sent to a plain port is said, too."""
    ca = Authority(folder=tmp_path)
    ca.issue("server")

    async def test() -> None:
        async with server(ca.settings("server", tls_client_auth="none")) as (port, certificates):
            for _ in range(3):
                with pytest.raises(BrokenError):
                    await get(port, Certificates(TlsSettings()), scheme="http")
            await until(lambda: certificates.handshakes.counts == {("server", "plain_text"): 3})
            assert [record.message for record in caplog.records].count(
                "TLS handshake refused: the client sends plain text to a port with TLS: use https://, or for parts of "
                "Block --tls-ca"
            ) == 1
        async with server(TlsSettings()) as (port, _):
            with pytest.raises(ConnectError, match="the server answers in plain text"):
                await get(port, Certificates(ca.settings()))

    with caplog.at_level(logging.WARNING):
        run_on(loop, test)


def connect_by(port: int, context: ssl.SSLContext) -> str | None:
    """Connect as another program would; return the protocol."""
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), WITHIN_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        return secured.version()


@LOOPS
def test_old_protocols_are_refused(tmp_path: Path, loop: str) -> None:
    """TLS 1.1 is refused with an alert; 1.2 and 1.3 are served."""
    ca = Authority(folder=tmp_path)
    ca.issue("server")

    def limited(version: ssl.TLSVersion) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ciphers("DEFAULT@SECLEVEL=0")  # else this side would not even offer it
        context.minimum_version = context.maximum_version = version
        return context

    async def test() -> None:
        async with server(ca.settings("server", tls_client_auth="none")) as (port, certificates):
            for version, name in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
                assert await asyncio.to_thread(connect_by, port, limited(version)) == name
            with pytest.warns(DeprecationWarning, match="TLSv1_1"):
                old = limited(ssl.TLSVersion.TLSv1_1)
            with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
                await asyncio.to_thread(connect_by, port, old)
            await until(lambda: certificates.handshakes.counts == {("server", "old_protocol"): 1})

    run_on(loop, test)


def test_a_server_that_is_not_on_the_list_is_refused(tmp_path: Path) -> None:
    """With an allow-list, the name counts and the host of the address does not."""
    ca = Authority(folder=tmp_path)
    ca.issue("server", "engine.pool.test")

    async def test() -> None:
        async with server(ca.settings("server", tls_client_auth="none")) as (port, _):
            assert await get(port, Certificates(ca.settings(peers=["*.pool.test"]))) == "https"
            stranger = Certificates(ca.settings(peers=["tagger.test"]))
            with pytest.raises(ConnectError) as refused:
                await get(port, stranger)
            assert str(refused.value).endswith(
                "the server's certificate is for engine.pool.test, and --tls-peer allows tagger.test"
            )
            with pytest.raises(ConnectError, match="another"):
                await get(port, Certificates(ca.settings()))

    run_on("asyncio", test)
