"""Every method and every route has a role, so that a new one cannot be forgotten."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry

from protos.block.v1 import predictor_pb2, provisioner_pb2, scheduler_pb2, tagger_pb2
from protos.envoy.v3 import external_processor_pb2
from services.gateway.app import Gateway
from services.http.operator_port import OperatorPort
from services.live_page.pages import LivePage
from services.placement.instance_pages import InstancePages
from services.security.access import AccessControl
from services.security.roles import (
    FOR_ANYONE,
    FOR_CLIENTS,
    METHODS,
    OBJECT_FIELDS,
    ROUTES,
    Role,
    permission_of_method,
    permission_of_route,
)

SERVICES = Path(__file__).parents[3] / "services"
FILES = (scheduler_pb2, predictor_pb2, tagger_pb2, provisioner_pb2, external_processor_pb2)
# Applications that stand before one engine, or are one: they check no keys of ours.
ENGINES = ("services/emulator", "services/predictor_server")
VERBS = {"GET", "POST", "PUT", "DELETE", "PATCH", "*"}


def methods() -> Iterator[str]:
    """List the methods of all services that any file describes."""
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}"


def applications() -> list[Mapping[str, Mapping[str, object]]]:
    """Return the routes of all applications that check callers: gateways and the ports of operators."""
    gateway = Gateway(mock.MagicMock(), AccessControl())
    port = OperatorPort(CollectorRegistry())
    return [gateway.routes, port.routes, LivePage(mock.Mock()).routes, InstancePages(mock.Mock(), mock.Mock()).routes]


def routes_in_sources() -> Iterator[tuple[str, str]]:
    """List the routes that any source writes out: keys of dictionaries that are paths, with HTTP methods in them."""
    for path in sorted(SERVICES.rglob("*.py")):
        if any(engine in str(path) for engine in ENGINES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
                verbs = [one.value for one in getattr(value, "keys", ()) if isinstance(one, ast.Constant)]
                if verbs and set(verbs) <= VERBS and isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield from ((verb, key.value) for verb in verbs)


def test_every_method_has_a_role() -> None:
    """The table has all methods, and no other ones; one that it lacks would be for operators."""
    assert sorted(METHODS) == sorted(methods())
    assert permission_of_method("/block.v1.Scheduler/New").roles == {Role.OPERATOR}
    assert set(OBJECT_FIELDS) <= {method for method in METHODS if METHODS[method].event}


def test_every_route_has_a_role() -> None:
    """All routes of all applications, and all that any source writes out, are in the table."""
    served = {(verb, path) for routes in applications() for path, verbs in routes.items() for verb in verbs}
    assert {
        ("GET", "/metrics"), ("POST", "/v1/completions"), ("GET", "/ui/tail"), ("GET", "/ui/page.js"), ("POST", "/instances"),
    } <= served  # fmt: skip
    written = set(routes_in_sources())
    assert ("GET", "/metrics") in written
    assert [route for route in served | written if permission_of_route(*route) is None] == []


def test_who_may_change_or_see_what() -> None:
    """What operators alone may do, and what needs no key."""
    operators = {method for method, one in METHODS.items() if one.roles == {Role.OPERATOR}}
    assert operators == {"/block.v1.Scheduler/UsePolicy"}
    assert all(Role.CLIENT not in one.roles for one in METHODS.values() if one is not FOR_ANYONE)
    assert {pattern for _, pattern, one in ROUTES if one is FOR_ANYONE} == {
        "/health", "/ready", "/metrics", "/ui", "/ui/*",
    }  # fmt: skip
    assert all(one.event for *_, one in ROUTES if Role.CLIENT not in one.roles)


@pytest.mark.parametrize(
    ("method", "path", "event", "changes"),
    [
        ("GET", "/ui/tail", "tail", False),
        ("HEAD", "/ui/tail", "tail", False),
        ("GET", "/ui/decision", "explain", False),
        ("POST", "/instances", "register_instance", True),
        ("DELETE", "/instances/gpu-7", "remove_instance", True),
        ("POST", "/instances/gpu-7/drain", "drain_instance", True),
        ("DELETE", "/instances/gpu-7/drain", "undrain_instance", True),
    ],
)
def test_routes_of_operators(method: str, path: str, event: str, changes: bool) -> None:
    """Each has a name in the audit log."""
    permission = permission_of_route(method, path)
    assert permission is not None
    assert (permission.roles, permission.event, permission.changes) == ({Role.OPERATOR}, event, changes)


def test_other_routes() -> None:
    """Clients' routes are open to clients; a route without a row has no permission."""
    assert permission_of_route("POST", "/v1/anything/new") is FOR_CLIENTS
    assert permission_of_route("HEAD", "/health") is FOR_ANYONE
    assert permission_of_route("POST", "/ui/tail") is None
    assert permission_of_route("GET", "/nowhere") is None
