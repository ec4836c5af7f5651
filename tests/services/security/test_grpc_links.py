"""gRPC servers and both kinds of calls to them with TLS, over real sockets: what is refused, and what is said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from length_tagger import chained
from protos.block.v1 import common_pb2, tagger_pb2, tagger_pb2_grpc
from services.rpc.channels import open_channel
from services.rpc.server import RunningServer, serving
from services.rpc.settings import ServerSettings
from services.security.certificates import Certificates
from services.security.settings import NO_TLS, TlsSettings
from services.tagger_server.service import TaggerService
from tests.services.security.authorities import Authority, run_on
from tests.services.waiting import until

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
REQUEST = tagger_pb2.TagRequest(request=common_pb2.Request(request_id="one", prompt_tokens=3))
PATIENCE_S = 30.0


@asynccontextmanager
async def tagger(tls: TlsSettings, **settings: object) -> AsyncIterator[RunningServer]:
    """Run a length tagger."""
    registry = CollectorRegistry()
    register = partial(
        tagger_pb2_grpc.add_LengthTaggerServicer_to_server, TaggerService(chained(["constant"]), registry)
    )
    async with serving(ServerSettings(drain_s=0.0, tls=tls, **settings), [register], registry) as here:
        yield here


async def tag(port: int, tls: TlsSettings, host: str = "127.0.0.1") -> tagger_pb2.TagResponse:
    """Ask for a tag."""
    async with open_channel(f"{host}:{port}", certificates=Certificates(tls)) as channel:
        return await tagger_pb2_grpc.LengthTaggerStub(channel).Tag(REQUEST, timeout=PATIENCE_S)


async def refused(port: int, tls: TlsSettings) -> grpc.aio.AioRpcError:
    """Ask for a tag, which must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await tag(port, tls)
    return error.value


@LOOPS
def test_both_sides_present_certificates(tmp_path: Path, loop: str) -> None:
    """A call passes where each side knows the CA of the other, and its name is allowed."""
    ca = Authority(folder=tmp_path)
    ca.issue("tagger")
    ca.issue("gateway")

    async def test() -> None:
        async with tagger(ca.settings("tagger", peers=["scheduler.test", "gateway.test"])) as here:
            assert (await tag(here.port, ca.settings("gateway"))).HasField("tag")
            assert (await tag(here.port, ca.settings("gateway", peers=["tagger.test"]))).HasField("tag")

    run_on(loop, test)


@LOOPS
@pytest.mark.parametrize(
    ("days", "names", "foreign", "text"),
    [
        (-1.0, (), False, "the server's certificate has expired: renew it"),
        (1.0, ("elsewhere.test",), False, "the server's certificate is for another address"),
        (1.0, (), True, "the server's certificate is signed by a CA that is not in the CA file (--tls-ca)"),
    ],
)
def test_a_client_refuses_a_server(
    tmp_path: Path, loop: str, days: float, names: tuple[str, ...], *, foreign: bool, text: str
) -> None:
    """The status of the call says what is wrong with the certificate."""
    ca, other = Authority(folder=tmp_path), Authority(folder=tmp_path / "other")
    ca.issue("tagger", *names, days=days, signed_by=other.pair if foreign else None)
    ca.issue("gateway")

    async def test() -> None:
        async with tagger(ca.settings("tagger")) as here:
            error = await refused(here.port, ca.settings("gateway"))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert f"127.0.0.1:{here.port} cannot be reached: {text}" in error.details()

    run_on(loop, test)


@LOOPS
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "it requires a client certificate: give --tls-cert and --tls-key"),
        ("other", "it refuses our certificate"),
        ("expired", "it refuses our certificate"),
    ],
)
def test_a_server_refuses_a_client(tmp_path: Path, loop: str, case: str, text: str) -> None:
    """The status of the call says that the certificate is missing, or not accepted."""
    ca, other = Authority(folder=tmp_path), Authority(folder=tmp_path / "other")
    ca.issue("tagger")
    ca.issue("gateway", days=-1.0 if case == "expired" else 1.0, signed_by=other.pair if case == "other" else None)

    async def test() -> None:
        async with tagger(ca.settings("tagger")) as here:
            error = await refused(here.port, ca.settings("" if case == "none" else "gateway"))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert text in error.details()

    run_on(loop, test)


def test_a_client_that_is_not_on_the_list_is_refused(tmp_path: Path) -> None:
    """The status names the certificate's names and the setting, and it is counted."""
    ca = Authority(folder=tmp_path)
    ca.issue("tagger")
    ca.issue("engine")

    async def test() -> None:
        async with tagger(ca.settings("tagger", peers=["*.block.test"])) as here:
            error = await refused(here.port, ca.settings("engine"))
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert error.details() == (
                "the client's certificate is for engine.test, localhost, 127.0.0.1, and --tls-peer allows *.block.test"
            )

    run_on("asyncio", test)


def test_a_common_name_is_no_name_of_a_peer(tmp_path: Path) -> None:
    """CAs check alternative names only, so a client cannot pass by another text in its subject."""
    ca = Authority(folder=tmp_path)
    ca.issue("tagger")
    ca.issue("engine")
    ours = x509.load_pem_x509_certificate((tmp_path / "engine.crt").read_bytes())
    builder = x509.CertificateBuilder(
        issuer_name=ours.issuer, public_key=ours.public_key(), serial_number=ours.serial_number,
        not_valid_before=ours.not_valid_before_utc, not_valid_after=ours.not_valid_after_utc,
        subject_name=x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway.test")]),
        extensions=list(ours.extensions),
    )  # fmt: skip
    signed = builder.sign(load_pem_private_key(ca.pair.key, password=None), SHA256())
    (tmp_path / "engine.crt").write_bytes(signed.public_bytes(Encoding.PEM))

    async def test() -> None:
        async with tagger(ca.settings("tagger", peers=["gateway.test"])) as here:
            error = await refused(here.port, ca.settings("engine"))
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "is for engine.test" in error.details()

    run_on("asyncio", test)


def test_names_are_checked_where_clients_need_a_certificate(tmp_path: Path) -> None:
    """With --tls-client-auth none, --tls-peer is for servers only: a client without a certificate is served."""
    ca = Authority(folder=tmp_path)
    ca.issue("tagger")

    async def test() -> None:
        async with tagger(ca.settings("tagger", peers=["tagger.test"], tls_client_auth="none")) as here:
            assert (await tag(here.port, ca.settings())).HasField("tag")

    run_on("asyncio", test)


def test_one_side_in_plain_text(tmp_path: Path) -> None:
    """A call without TLS to a server with it fails, and the other way round."""
    ca = Authority(folder=tmp_path)
    ca.issue("tagger")

    async def test() -> None:
        async with tagger(ca.settings("tagger")) as here:
            assert (await refused(here.port, NO_TLS)).code() is grpc.StatusCode.UNAVAILABLE
        async with tagger(NO_TLS) as here:
            error = await refused(here.port, ca.settings("tagger"))
            assert "the server answers in plain text: it has no TLS" in error.details()

    run_on("asyncio", test)


def test_probes_need_no_certificate(tmp_path: Path) -> None:
    """The health port is plain text and serves health alone."""
    ca = Authority(folder=tmp_path)
    ca.issue("tagger")

    async def test() -> None:
        async with tagger(ca.settings("tagger"), health_port=0) as here:
            assert here.health_port is not None
            async with open_channel(f"127.0.0.1:{here.health_port}", certificates=Certificates(NO_TLS)) as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                reply = await check(health_pb2.HealthCheckRequest(service="block.v1.LengthTagger"), timeout=PATIENCE_S)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await tagger_pb2_grpc.LengthTaggerStub(channel).Tag(REQUEST, timeout=PATIENCE_S)
                assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED

    run_on("asyncio", test)


@LOOPS
def test_certificates_change_while_serving(tmp_path: Path, loop: str) -> None:
    """A connection continues; new ones get the new certificate, by another CA; a broken file changes nothing."""
    old, new = Authority(folder=tmp_path / "old"), Authority(folder=tmp_path / "new")
    server = Authority(folder=tmp_path / "server", pair=old.pair)
    server.issue("tagger")
    old.issue("gateway")
    new.issue("gateway")

    async def test() -> None:
        async with (
            tagger(server.settings("tagger")) as here,
            open_channel(f"127.0.0.1:{here.port}", certificates=Certificates(old.settings("gateway"))) as channel,
        ):
            stub = tagger_pb2_grpc.LengthTaggerStub(channel)
            await stub.Tag(REQUEST, timeout=PATIENCE_S)
            (server.folder / "tagger.key").write_text("half a")
            await tag(here.port, old.settings("gateway"))
            server.pair = new.pair
            server.issue("tagger")
            server.ca_file.write_bytes(new.pair.certificate)

            async def renewed() -> bool:
                try:
                    await tag(here.port, new.settings("gateway"))
                except grpc.aio.AioRpcError:
                    return False
                return True

            await until(renewed)
            await stub.Tag(REQUEST, timeout=PATIENCE_S)  # on the connection of before
            error = await refused(here.port, old.settings("gateway"))
            assert error.code() is grpc.StatusCode.UNAVAILABLE

    run_on(loop, test)
