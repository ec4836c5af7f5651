"""Who is admitted: by key, certificate and place; and real schedulers that are called by all of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from protos.block.v1 import common_pb2, scheduler_pb2
from services.http.application import Call
from services.http.operator_port import OperatorPort, operator_port_served
from services.http.server import answering, listening
from services.live_page.pages import live_page_routes
from services.rpc.channels import open_channel
from services.rpc.errors import UnknownNameError
from services.rpc.grpc_channel import GrpcChannel
from services.rpc.server import ServerSettings
from services.security.access import (
    NO_PERMISSION,
    AccessControl,
    Credentials,
    alternative_names,
    certificate_names,
    http_credentials,
    is_from_other_site,
    is_loopback,
)
from services.security.access_metrics import AccessMetrics
from services.security.access_settings import AccessSettings, access_controlled
from services.security.errors import NotAllowedError, UnauthenticatedError
from services.security.key_file import keys_in
from services.security.own_key import OwnKey
from services.security.roles import FOR_ANYONE, FOR_CLIENTS, FOR_PARTS, Permission, changes
from tests.services.cli.running import block
from tests.services.gateway.stubs import completes, engines, scene
from tests.services.scheduler_server.running import scheduler
from tests.services.security.key_files import key, write_keys
from tests.services.stub_sidecars import sidecars
from tests.services.waiting import PATIENCE_S, run, until

OPERATORS = changes("use_policy")
KEYS = keys_in(
    key("c", "carl") + key("p", "part-1", role="part") + key("o", "olga", role="operator")
    + key("old", role="operator", expires="2020-01-01"), "f",
)  # fmt: skip
HERE, THERE = {"is_local": True, "peer": "127.0.0.1:5"}, {"peer": "10.0.0.9:5"}


def admitted(access: AccessControl, permission: Permission, **shown: Any) -> str:
    """Return name and role of a caller, or why it is refused."""
    try:
        caller = access.admit(permission, Credentials(**shown))
    except UnauthenticatedError as error:
        return f"401 {error.reason}"
    except NotAllowedError:
        return "403"
    return f"{caller.name or '-'} {caller.role}"


def test_without_keys() -> None:
    """Clients and parts come as they are, operators from this machine; a key means nothing."""
    access = AccessControl()
    assert admitted(access, FOR_ANYONE, **THERE) == "- anyone"
    assert admitted(access, FOR_CLIENTS, **THERE) == "- client"
    assert admitted(access, FOR_PARTS, **THERE, key=b"any") == "- part"
    assert admitted(access, OPERATORS, **HERE) == "- operator"
    assert admitted(access, OPERATORS, **THERE, key=b"o") == "403"
    assert access.is_open
    assert not access.checks_keys


def test_with_keys() -> None:
    """Every call needs a key of the right role, wherever it comes from."""
    access = AccessControl(lambda: KEYS)
    for place in (HERE, THERE):
        assert admitted(access, FOR_ANYONE, **place) == "- anyone"
        for permission, by_key in (
            (FOR_CLIENTS, {b"c": "carl client", b"p": "403", b"o": "olga operator"}),
            (FOR_PARTS, {b"c": "403", b"p": "part-1 part", b"o": "olga operator"}),
            (OPERATORS, {b"c": "403", b"p": "403", b"o": "olga operator"}),
        ):
            for secret, expected in by_key.items():
                assert admitted(access, permission, **place, key=secret) == expected
            assert admitted(access, permission, **place) == "401 invalid_key"
            assert admitted(access, permission, **place, key=b"x") == "401 invalid_key"
            assert admitted(access, permission, **place, key=b"old") == "401 expired_key"


def test_with_certificates() -> None:
    """A verified certificate stands for a part; a name in the list for an operator; clients need their keys still."""
    access = AccessControl(operator_peers=("ops.example",))
    part, operator = {"certificate_names": ("gw.example",)}, {"certificate_names": ("x", "ops.example")}
    assert admitted(access, OPERATORS, **HERE) == "403"
    assert admitted(access, OPERATORS, **THERE, **part) == "403"
    assert admitted(access, OPERATORS, **THERE, **operator) == "ops.example operator"
    assert admitted(access, FOR_PARTS, **THERE, **part) == "gw.example part"
    access = AccessControl(lambda: KEYS, operator_peers=("ops.example",))
    assert admitted(access, FOR_PARTS, **THERE, **part) == "gw.example part"
    assert admitted(access, FOR_CLIENTS, **THERE, **part) == "401 invalid_key"
    assert admitted(access, FOR_CLIENTS, **THERE, **part, key=b"c") == "carl client"
    assert admitted(access, FOR_CLIENTS, **THERE, **operator) == "ops.example operator"
    assert admitted(access, OPERATORS, **THERE, **part, key=b"o") == "olga operator"
    names = {"transport_security_type": [b"ssl"], "x509_common_name": [b"cn"],
             "x509_subject_alternative_name": [b"a", b"b", b"a"]}  # fmt: skip
    assert certificate_names(names) == alternative_names(names) == ("a", "b")  # a common name may be any text
    only_common = {**names, "x509_subject_alternative_name": []}
    assert (certificate_names(only_common), alternative_names(only_common)) == (("cn",), ())
    assert certificate_names({**names, "transport_security_type": [b"insecure"]}) == ()
    assert certificate_names({}) == ()


def test_a_caller_that_has_left_is_not_local() -> None:
    """The address of a connection that was reset before it was accepted is unknown, so the caller is no operator."""

    async def test() -> None:
        registry = CollectorRegistry()
        changed: list[str] = []
        app = OperatorPort(registry, AccessControl(metrics=AccessMetrics(registry)))

        async def change(call: Call) -> None:
            changed.append(call.scope["path"])

        app.routes = {"/instances": {"POST": change}}
        with listening("127.0.0.1", 0) as listener:
            listener.listen()
            with socket.create_connection(listener.getsockname()) as caller:
                caller.sendall(b"POST /instances HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            async with answering(app, listener, 1.0):
                refused = ("block_access_refused_total", {"reason": NO_PERMISSION})
                await until(lambda: bool(changed) or registry.get_sample_value(*refused) == 1)
        assert not changed

    run(test)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.7", False),
        ("128.0.0.1", False), ("fe80::1", False), ("::127.0.0.1", False), ("", False), ("localhost.evil.example", False),
    ],
)  # fmt: skip
def test_loopback_addresses(host: str, local: bool) -> None:
    """Only addresses that no other machine can have count."""
    assert is_loopback(host) == local


@pytest.mark.parametrize(
    ("headers", "other"),
    [
        ({}, False),
        ({"host": "127.0.0.1:9090"}, False),
        ({"host": "[::1]:9090", "origin": "http://[::1]:9090"}, False),
        ({"host": "localhost:9090", "origin": "http://localhost:9090", "sec-fetch-site": "same-origin"}, False),
        ({"host": "localhost:9090", "sec-fetch-site": "none"}, False),
        ({"host": "localhost:9090", "origin": "http://localhost:8080"}, True),
        ({"host": "localhost:9090", "origin": "null"}, True),
        ({"host": "localhost:9090", "sec-fetch-site": "same-site"}, True),
        ({"host": "rebound.example:9090"}, True),
        ({"host": "[bad"}, True),
    ],
)
def test_pages_of_other_sites(headers: dict[str, str], other: bool) -> None:
    """A browser on this machine must not act for a page of another site."""
    raw = {name.encode(): value.encode() for name, value in headers.items()}
    assert is_from_other_site(raw) == other
    scope = {"headers": list(raw.items()), "client": ("127.0.0.1", 5)}
    assert http_credentials(scope).is_local != other


# Real servers.


def access_of(path: Path, *tables: str, **more: Any) -> ServerSettings:
    """Return the settings of a server with keys."""
    return ServerSettings(access=AccessSettings(api_key_file=write_keys(path, *tables), **more))


async def code_of(call: Awaitable[Any]) -> str:
    """Return the status of a call."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def test_a_scheduler_with_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each method asks for its role; health is open; operators' calls and their refusals are audited, without a key."""
    server = access_of(
        tmp_path / "keys.toml", key("sk-part", "gw", role="part"), key("sk-op", "olga", role="operator"),
        key("sk-client", "carl"), audit_log=str(tmp_path / "audit"),
    )  # fmt: skip
    caplog.set_level(logging.DEBUG)

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, server) as client:
            request = scheduler_pb2.ScheduleRequest(request=client.request())
            calls: dict[str, Callable[[Any], Any]] = {
                "Schedule": lambda metadata: client.stub.Schedule(request, metadata=metadata),
                "ListInstances": lambda metadata: client.stub.ListInstances(
                    scheduler_pb2.ListInstancesRequest(), metadata=metadata
                ),
                "Release": lambda metadata: client.stub.Release(
                    common_pb2.ReleaseRequest(request_id="r1", instance_id="a"), metadata=metadata
                ),
                "Explain": lambda metadata: client.stub.Explain(
                    scheduler_pb2.ExplainRequest(request_id="r1"), metadata=metadata
                ),
                "UsePolicy": lambda metadata: client.stub.UsePolicy(
                    scheduler_pb2.UsePolicyRequest(policy="jsq"), metadata=metadata
                ),
                "Tail": lambda metadata: client.stub.Tail(scheduler_pb2.TailRequest(), metadata=metadata).read(),
            }
            refused = {None: "UNAUTHENTICATED", "sk-none": "UNAUTHENTICATED", "sk-client": "PERMISSION_DENIED"}
            for name, call in calls.items():
                for secret in (None, "sk-none", "sk-client", "sk-part", "sk-op"):
                    metadata = None if secret is None else (("authorization", f"Bearer {secret}"),)
                    expected = refused.get(secret, "OK")
                    if (name, secret) == ("UsePolicy", "sk-part"):
                        expected = "PERMISSION_DENIED"
                    assert await code_of(call(metadata)) == expected, (name, secret)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{client.port}") as channel:
                health = health_pb2_grpc.HealthStub(channel)
                assert await code_of(health.Check(health_pb2.HealthCheckRequest())) == "OK"
            assert client.count("block_access_refused_total", reason="invalid_key") == 12
            assert client.count("block_access_refused_total", reason="no_permission") == 7

    run(test)
    lines = [record for record in caplog.records if record.name == "block.audit"]
    found = [(record.getMessage(), *(record.fields[one] for one in ("actor", "object", "result"))) for record in lines]  # type: ignore[attr-defined]
    assert found == [
        (event, actor, subject, result)
        for event, subject, by_part in (("explain", "r1", "ok"), ("use_policy", "jsq", "refused"), ("tail", "-", "ok"))
        for actor, result in (("-", "refused"), ("-", "refused"), ("carl", "refused"), ("gw", by_part), ("olga", "ok"))
    ]
    assert len((tmp_path / "audit").read_text().splitlines()) == len(found)
    written = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    assert "sk-" not in written + (tmp_path / "audit").read_text()


def test_a_failed_action_is_audited_as_failed(caplog: pytest.LogCaptureFixture) -> None:
    """The caller was admitted, and what it wanted was not possible."""

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs) as client:
            policy = scheduler_pb2.UsePolicyRequest(policy="no such policy")
            assert await code_of(client.stub.UsePolicy(policy)) == "INVALID_ARGUMENT"

    run(test)
    (line,) = (record for record in caplog.records if record.name == "block.audit")
    fields = line.fields  # type: ignore[attr-defined]
    assert (fields["object"], fields["result"], fields["role"]) == ("no such policy", "failed", "operator")


def test_parts_show_their_keys(tmp_path: Path) -> None:
    """A gateway with a part's key is served by a scheduler that shows its own to sidecars; a removed key is refused."""
    keys, own = tmp_path / "keys.toml", tmp_path / "part.key"
    own.write_text("sk-part\n")
    server = access_of(keys, key("sk-part", "gw", role="part"))

    async def test() -> None:
        async with AsyncExitStack() as stack:
            (stub,) = await stack.enter_async_context(sidecars("a"))
            (engine,) = await stack.enter_async_context(engines(completes))
            stub.engine_url = engine.url
            client = await stack.enter_async_context(scheduler([stub], server))
            address = f"127.0.0.1:{client.port}"
            async with scene(schedulers=(address,), part_key_file=str(own)) as here:
                response = await here.post(model="m")
                assert (response.status_code, response.headers["x-block-instance"]) == (200, "a")
                assert (await here.client.get("/v1/models")).status_code == 200
            async with scene(schedulers=(address,)) as here:
                response = await here.post(model="m")
                assert response.status_code == 503
                assert await here.metric("block_gateway_scheduler_failures_total") >= 1
            write_keys(keys, key("sk-other", "gw", role="part"))
            async with GrpcChannel(address, key=OwnKey(str(own))) as channel:

                async def is_refused() -> bool:
                    call = channel.unary("/block.v1.Scheduler/ListInstances", b"", timeout_s=PATIENCE_S)
                    return await code_of(call) == "UNAUTHENTICATED"

                await until(is_refused)

    run(test)


def test_all_kinds_of_calls_show_the_key(tmp_path: Path) -> None:
    """Unary calls and streams of both channels have it, and nothing else changes."""
    server = access_of(tmp_path / "keys.toml", key("sk-op", "olga", role="operator"))

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, server) as client:
            address = f"127.0.0.1:{client.port}"
            async with open_channel(address, OwnKey(key="sk-op")) as channel:
                stub: Any = type(client)(channel).stub
                assert await code_of(stub.ListInstances(scheduler_pb2.ListInstancesRequest())) == "OK"
                async with aclosing(aiter(stub.Tail(scheduler_pb2.TailRequest()))) as tail:
                    assert (await anext(tail)).frame_json
            async with open_channel(address) as channel:
                stub = type(client)(channel).stub
                assert await code_of(stub.ListInstances(scheduler_pb2.ListInstancesRequest())) == "UNAUTHENTICATED"

    run(test)


def test_commands_call_with_a_key(tmp_path: Path) -> None:
    """By a file or a variable; without one they say in one line what is missing."""
    server = access_of(tmp_path / "keys.toml", key("sk-op", "olga", role="operator"))
    own = tmp_path / "own.key"
    own.write_text("sk-op")

    async def test() -> None:
        async with sidecars("a") as stubs, scheduler(stubs, server) as client:
            to = ("--scheduler", f"127.0.0.1:{client.port}")
            with_file = ("--api-key-file", str(own))
            for words, status, expected in (
                (("policies", "show", *to), 2, "this needs an API key"),
                (("policies", "show", *to, *with_file), 0, "instances: a"),
                (("policies", "use", "jsq", *to, *with_file), 0, "jsq (before: block)"),
                (("explain", "r1", *to), 2, "this needs an API key"),
                (("explain", "r1", *to, *with_file), 2, "r1"),
            ):
                done = await asyncio.to_thread(block, *words)
                assert (done.returncode, expected in done.stdout + done.stderr) == (status, True), done
                assert "sk-op" not in done.stdout + done.stderr
            done = await asyncio.to_thread(block, "policies", "show", *to, BLOCK_API_KEY="sk-op")
            assert done.returncode == 0
            done = await asyncio.to_thread(block, "policies", "show", *to, "--api-key-file", "/nowhere")
            assert (done.returncode, "/nowhere: cannot be read" in done.stderr) == (2, True)

    run(test)


def test_the_operators_port_asks_for_keys(tmp_path: Path) -> None:
    """Metrics are open there, the live page's data are not, nor a route that the table of all routes lacks."""
    settings = AccessSettings(api_key_file=write_keys(tmp_path / "keys.toml", key("o", role="operator")))

    async def test() -> None:
        async with access_controlled(settings, CollectorRegistry()) as access:
            app = OperatorPort(CollectorRegistry(), access)
            more = {"/new": app.routes["/metrics"]}
            app.routes = {**app.routes, **more, **live_page_routes(NoDecisions(), app)}
            async with (
                operator_port_served(app, "127.0.0.1", 0) as port,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http,
            ):
                for path, without, by_operator in (
                    ("/metrics", 200, 200), ("/ui", 200, 200), ("/ui/decision?request_id=x", 401, 404), ("/new", 401, 200),
                ):  # fmt: skip
                    assert (await http.get(path)).status_code == without
                    assert (await http.get(path, headers={"x-api-key": "o"})).status_code == by_operator

    run(test)


class NoDecisions:
    """A source of the live page that knows no decision."""

    async def explain(self, request_id: str) -> common_pb2.Decision:
        """Find nothing."""
        raise UnknownNameError(request_id)
