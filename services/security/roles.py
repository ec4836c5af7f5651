"""Which role each gRPC method and each HTTP route needs, and the name of its line in the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from types import MappingProxyType


class Role(StrEnum):
    """What a caller may do."""

    ANYONE = "anyone"  # health, metrics, files without data
    CLIENT = "client"  # sends requests to a gateway
    PART = "part"  # a part of Block that calls another one
    OPERATOR = "operator"  # sees what all clients do, and changes what the parts do


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """The roles that may do something; calls with an `event` are written to the audit log under this name."""

    roles: frozenset[Role]
    event: str = ""
    changes: bool = False  # what the server does from then on
    is_polled: bool = False  # so that only refusals are written

    @property
    def needs_check(self) -> bool:
        """Whether a caller is checked at all."""
        return Role.ANYONE not in self.roles

    @property
    def needed(self) -> Role:
        """The least role that may do it."""
        return next(role for role in Role if role in self.roles)


FOR_ANYONE = Permission(roles=frozenset(Role))
FOR_CLIENTS = Permission(roles=frozenset((Role.CLIENT, Role.OPERATOR)))
FOR_PARTS = Permission(roles=frozenset((Role.PART, Role.OPERATOR)))
FOR_OPERATORS = Permission(roles=frozenset((Role.OPERATOR,)), event="operator_call")


def reads(event: str) -> Permission:
    """Return what operators may read."""
    return Permission(roles=frozenset((Role.OPERATOR,)), event=event)


def polls(event: str) -> Permission:
    """Return what operators and their commands read again and again."""
    return Permission(roles=frozenset((Role.OPERATOR,)), event=event, is_polled=True)


def changes(event: str) -> Permission:
    """Return what operators may change."""
    return Permission(roles=frozenset((Role.OPERATOR,)), event=event, changes=True)


def reads_for_pages(event: str) -> Permission:
    """Return what operators may read, and gateways for the live pages of operators whose keys they have checked."""
    return Permission(roles=frozenset((Role.PART, Role.OPERATOR)), event=event)


SCHEDULER, PREDICTOR = "/block.v1.Scheduler", "/block.v1.Predictor"
TAGGER, PROVISIONER = "/block.v1.LengthTagger", "/block.v1.Provisioner"

METHODS: Mapping[str, Permission] = MappingProxyType(
    {
        f"{SCHEDULER}/Schedule": FOR_PARTS,
        f"{SCHEDULER}/Generate": FOR_PARTS,
        f"{SCHEDULER}/Release": FOR_PARTS,
        f"{SCHEDULER}/ListInstances": FOR_PARTS,
        f"{SCHEDULER}/WatchDrains": FOR_PARTS,
        f"{SCHEDULER}/Explain": reads_for_pages("explain"),
        f"{SCHEDULER}/Tail": reads_for_pages("tail"),
        f"{SCHEDULER}/UsePolicy": changes("use_policy"),
        f"{PREDICTOR}/Predict": FOR_PARTS,
        f"{PREDICTOR}/PredictStream": FOR_PARTS,
        f"{PREDICTOR}/Reserve": FOR_PARTS,
        f"{PREDICTOR}/ReserveStream": FOR_PARTS,
        f"{PREDICTOR}/Release": FOR_PARTS,
        f"{PREDICTOR}/ReleaseStream": FOR_PARTS,
        f"{PREDICTOR}/Watch": FOR_PARTS,
        f"{TAGGER}/Tag": FOR_PARTS,
        f"{TAGGER}/Observe": FOR_PARTS,
        f"{PROVISIONER}/Report": FOR_PARTS,
        f"{PROVISIONER}/Status": FOR_PARTS,
        f"{PROVISIONER}/Plan": FOR_PARTS,
        f"{PROVISIONER}/History": FOR_PARTS,
        # Envoy sends no key: who may connect is a matter of TLS and of the network.
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process": FOR_ANYONE,
    }
)

# The field of a request that the audit log names as the object of a call.
OBJECT_FIELDS: Mapping[str, str] = MappingProxyType(
    {f"{SCHEDULER}/Explain": "request_id", f"{SCHEDULER}/UsePolicy": "policy"}
)

# Method and path; `*` stands for anything, slashes included. The first row that matches counts.
ROUTES: tuple[tuple[str, str, Permission], ...] = (
    ("GET", "/health", FOR_ANYONE),
    ("GET", "/ready", FOR_ANYONE),
    ("GET", "/metrics", FOR_ANYONE),
    ("GET", "/ui/tail", reads("tail")),
    ("GET", "/ui/decision", reads("explain")),
    ("GET", "/ui", FOR_ANYONE),  # files of the live page, which contain no data
    ("GET", "/ui/*", FOR_ANYONE),
    ("GET", "/instances", polls("list_instances")),
    ("GET", "/instances/*", polls("list_instances")),
    ("POST", "/instances", changes("register_instance")),
    ("PUT", "/instances/*", changes("register_instance")),
    ("POST", "/instances/*", changes("drain_instance")),
    ("DELETE", "/instances/*/drain", changes("undrain_instance")),
    ("DELETE", "/instances/*", changes("remove_instance")),
    ("*", "/v1/*", FOR_CLIENTS),
    ("*", "/v2/*", FOR_CLIENTS),
    *(
        ("*", path, FOR_CLIENTS)
        for path in ("/rerank", "/score", "/classify", "/pooling", "/tokenize", "/detokenize", "/openapi.json")
    ),
)


def permission_of_method(method: str) -> Permission:
    """Return who may call a gRPC method, as /package.Service/Method; one without a row is for operators."""
    return METHODS.get(method, FOR_OPERATORS)


@lru_cache(maxsize=1024)
def permission_of_route(method: str, path: str) -> Permission | None:
    """Return who may use an HTTP route; None where no row of the table matches."""
    method = "GET" if method == "HEAD" else method
    for methods, pattern, permission in ROUTES:
        if methods in ("*", method) and fnmatchcase(path, pattern):
            return permission
    return None
