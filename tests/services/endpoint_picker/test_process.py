"""`block serve picker` as a process: health, TLS, SIGTERM, settings that cannot be."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.envoy.v3 import external_processor_pb2_grpc
from services.cluster.child import Child
from services.security.development_ca import KeyPair, self_signed
from tests.ports import free_port
from tests.services.cli.running import refusal
from tests.services.endpoint_picker.running import Proxy, chosen, completion, head
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import run, until

LOCAL = "127.0.0.1"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
READINESS = ("", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor")
ONE = "one=http://127.0.0.1:8001,127.0.0.1:50052"


@asynccontextmanager
async def picker(*flags: str) -> AsyncIterator[Child]:
    """Run a picker as a process."""
    child = Child("picker", "picker", "--port", "0", "--sidecar-deadline-ms", "60000", "--schedule-s", "100", *flags)
    await child.start()
    try:
        yield child
    finally:
        await child.stop()


@asynccontextmanager
async def channel_to(port: int) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel of its own connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"{LOCAL}:{port}", options=options) as channel:
        yield channel


async def status_of(channel: grpc.aio.Channel, service: str) -> int:
    """Check the health of a service."""
    stub = health_pb2_grpc.HealthStub(channel)
    response: health_pb2.HealthCheckResponse = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return response.status


async def certificate_at(port: int) -> tuple[bytes, str | None]:
    """Return a server's certificate and its protocol."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(LOCAL, port, ssl=context)
    transport: ssl.SSLObject = writer.get_extra_info("ssl_object")
    found = transport.getpeercert(binary_form=True), transport.selected_alpn_protocol()
    writer.close()
    return found


def test_health_on_both_ports(tmp_path: Path) -> None:
    """Ready as soon as there is an instance, and no longer than that."""

    async def test() -> None:
        file = tmp_path / "instances.json"
        file.write_text("[]", encoding="utf-8")
        port = free_port()
        flags = ["--no-secure-serving", "--health-port", str(port), "--instances-file", str(file), "--poll-s", "0.02"]
        async with picker(*flags) as child, channel_to(child.port) as main, channel_to(port) as probes:
            for channel in (main, probes):
                assert await status_of(channel, "liveness") == SERVING
                assert {await status_of(channel, name) for name in READINESS} == {NOT_SERVING}
            instance = {"instance_id": "a", "engine_url": "http://localhost:1", "sidecar_address": "127.0.0.1:1"}
            complete = tmp_path / "new"
            complete.write_text(json.dumps([instance]), encoding="utf-8")
            complete.rename(file)

            async def ready() -> bool:
                return {await status_of(one, name) for one in (main, probes) for name in READINESS} == {SERVING}

            await until(ready)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status_of(probes, "other")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(test)


def test_tls_by_default() -> None:
    """With a certificate of its own, and HTTP/2 by ALPN."""

    async def test() -> None:
        async with picker("--instance", ONE) as child:
            certificate, protocol = await certificate_at(child.port)
            assert certificate
            assert protocol == "h2"

    run(test)


def test_certificates_of_files_are_renewed(tmp_path: Path) -> None:
    """New connections get the new certificate; files that are not whole are ignored."""
    key_file = tmp_path / "tls.key"

    def write(pair: KeyPair) -> bytes:
        key_file.write_bytes(pair.key)
        (tmp_path / "tls.crt").write_bytes(pair.certificate)
        return ssl.PEM_cert_to_DER_cert(pair.certificate.decode())

    async def test() -> None:
        first = write(self_signed("first"))
        async with picker("--instance", ONE, "--cert-path", str(tmp_path)) as child:
            assert (await certificate_at(child.port))[0] == first
            key_file.write_bytes(b"half a")
            assert (await certificate_at(child.port))[0] == first
            second = write(self_signed("second"))

            async def renewed() -> bool:
                return (await certificate_at(child.port))[0] == second

            await until(renewed)

    run(test)


def test_sigterm_lets_requests_finish() -> None:
    """From then on it is not ready, though it lives; requests that still come are taken until the last one ends."""

    async def test() -> None:
        async with sidecars("a") as (sidecar,):
            flag = f"a=http://127.0.0.1:8001,127.0.0.1:{sidecar.port}"
            port = free_port()
            flags = ["--no-secure-serving", "--health-port", str(port), "--drain-s", "100"]
            async with (
                picker("--instance", flag, *flags) as child,
                channel_to(child.port) as main,
                channel_to(port) as probes,
            ):
                stub = external_processor_pb2_grpc.ExternalProcessorStub(main)
                first = await _placed(Proxy(call=stub.Process()))
                stopping = asyncio.create_task(child.stop())

                async def draining() -> bool:
                    return {await status_of(one, "readiness") for one in (main, probes)} == {NOT_SERVING}

                await until(draining)
                assert await status_of(probes, "liveness") == SERVING
                second = await _placed(Proxy(call=stub.Process()))
                for one in (first, second):
                    await one.respond()
                    await one.read()
                    await one.respond_body(b"{}")
                    await one.read()
                    await one.finish()
                await until(lambda: len(sidecar.outcomes) == 2)
                await stopping

    run(test)


async def _placed(one: Proxy) -> Proxy:
    await one.send_headers(head())
    await one.send_body(completion())
    assert chosen(await one.read()) == ["127.0.0.1:8001"]
    await one.read()
    return one


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ([], "instances"),
        (["--instance", "one=http://127.0.0.1:8001/v1,127.0.0.1:50052"], "engine_url"),
        (["--instance", "one=http://no-such-host.invalid:8001,127.0.0.1:50052"], "engine_url"),
        (["--instance", ONE, "--cert-path", "/nowhere"], "cert_path"),
        (["--instance", ONE, "--cert-path", "/nowhere", "--no-secure-serving"], "cert_path"),
        (["--instance", ONE, "--max-endpoints", "0"], "max_endpoints"),
        (["--instance", ONE, "--schedule-s", "0"], "schedule_s"),
        (["--instance", ONE, "--accept-s", "-1"], "accept_s"),
        (["--instance", ONE, "--health-port", "70000"], "health_port"),
        (["--instance", ONE, "--policy", "best"], "policy"),
    ],
)
def test_bad_settings_are_refused_in_one_line(flags: list[str], field: str) -> None:
    """The line names the setting."""
    assert field in refusal("serve", "picker", "--port", "0", *flags)
