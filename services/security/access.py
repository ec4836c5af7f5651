"""Checks who calls: by API key, by the name of a client certificate, or by where the call comes from."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from services.security.access_metrics import AccessMetrics
from services.security.audit import FAILED, NO_AUDIT, OK, REFUSED, AuditLog
from services.security.errors import NotAllowedError, UnauthenticatedError
from services.security.keys import NO_KEYS, ApiKeys, KeyHolder
from services.security.roles import Permission, Role, permission_of_route

AUTHORIZATION, API_KEY = b"authorization", b"x-api-key"
KEY_HEADERS = frozenset((AUTHORIZATION, API_KEY))
BEARER = b"bearer "
INVALID_KEY, EXPIRED_KEY, NO_PERMISSION = "invalid_key", "expired_key", "no_permission"  # reasons, as metrics name them


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a caller shows, and where it calls from."""

    key: bytes | None = None
    peer: str = ""  # address and port
    is_local: bool = False  # on this machine, and not by a page of another site
    certificate_names: Sequence[str] = ()  # of a client certificate that TLS has verified


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, after the check."""

    holder: KeyHolder
    peer: str = ""

    @property
    def name(self) -> str:
        """The name of the key or certificate; empty where neither was needed."""
        return self.holder.name

    @property
    def role(self) -> Role:
        """What the caller may do."""
        return self.holder.role


_AS_THEY_COME = {role: Caller(holder=KeyHolder(role=role)) for role in Role}  # where nothing is checked


class AccessControl:
    """Admits callers by role.

    Without keys, clients and parts are admitted as they come, and operators from this machine only. A client
    certificate that TLS has verified stands for a part, or, if its name is in `operator_peers`, for an operator.
    """

    def __init__(  # noqa: PLR0913 - what may decide
        self,
        keys: Callable[[], ApiKeys] = lambda: NO_KEYS,
        *,
        operator_peers: Collection[str] = (),
        audit: AuditLog = NO_AUDIT,
        metrics: AccessMetrics | None = None,
        problem: Callable[[], str] = str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Check by what `keys` returns at each call; `problem` says what is wrong with their file."""
        self._keys = keys
        self._operator_peers = frozenset(operator_peers)
        self._metrics = metrics
        self._clock = clock
        self.audit = audit
        self.problem = problem

    @property
    def keys(self) -> ApiKeys:
        """The accepted keys."""
        return self._keys()

    @property
    def checks_keys(self) -> bool:
        """Whether callers need keys, which then stay here."""
        return len(self._keys()) > 0

    @property
    def is_open(self) -> bool:
        """Whether neither keys nor names of operators are set."""
        return not self._operator_peers and not self.checks_keys

    def admit(self, permission: Permission, credentials: Credentials, subject: str = "") -> Caller:
        """Return who calls; UnauthenticatedError or NotAllowedError where the caller may not do it.

        `subject` is what an operator's action is about, for the audit log: refused actions are written here, others
        by whoever knows how they ended.
        """
        caller = Caller(holder=KeyHolder(role=Role.ANYONE), peer=credentials.peer)
        if Role.ANYONE in permission.roles:
            return caller
        try:
            caller = self._caller(permission, credentials)
            if caller.role not in permission.roles:
                raise NotAllowedError(
                    f"{caller.name!r} has the role {caller.role}, and this is for the role {permission.needed}"
                )
        except (UnauthenticatedError, NotAllowedError) as error:
            self.refused(error.reason if isinstance(error, UnauthenticatedError) else NO_PERMISSION)
            if permission.event:
                self.audit.record(
                    permission.event, actor=caller.name, role=caller.role, peer=caller.peer, subject=subject,
                    result=REFUSED, reason=str(error),
                )  # fmt: skip
            raise
        return caller

    def done(self, permission: Permission, caller: Caller, subject: str, *, result: str = OK) -> None:
        """Write a line about an operator's action that was admitted."""
        if permission.event and not permission.is_polled:
            self.audit.record(
                permission.event, actor=caller.name, role=caller.role, peer=caller.peer, subject=subject, result=result
            )

    def admit_http(self, scope: Mapping[str, Any], unlisted: Permission) -> Caller | None:
        """Return who calls an HTTP route; None where the route is for anyone.

        `unlisted` is the permission of a route that the table lacks.
        """
        permission = permission_of_route(scope["method"], scope["path"]) or unlisted
        if not permission.needs_check:
            return None
        if not permission.event and self.is_open:
            return _AS_THEY_COME[permission.needed]
        caller = self.admit(permission, http_credentials(scope), _object_of(scope))
        if not permission.changes:
            self.done(permission, caller, _object_of(scope))
        return caller

    def ended(self, caller: Caller, scope: Mapping[str, Any], status: int) -> None:
        """Write the line about an operator's change, now that its reply has been sent."""
        permission = permission_of_route(scope["method"], scope["path"])
        if permission is not None and permission.changes:
            self.done(permission, caller, _object_of(scope), result=OK if 200 <= status < 400 else FAILED)

    def refused(self, reason: str) -> None:
        """Count a refused call."""
        if self._metrics is not None:
            self._metrics.refused.labels(reason).inc()

    def _caller(self, permission: Permission, credentials: Credentials) -> Caller:
        peer = credentials.peer
        for name in credentials.certificate_names:
            if name in self._operator_peers:
                return Caller(holder=KeyHolder(name=name, role=Role.OPERATOR), peer=peer)
        keys = self._keys()
        if keys and credentials.key is not None:
            holder = keys.holder(credentials.key)
            if holder is None:
                raise UnauthenticatedError("this API key is not known here")
            if holder.is_expired(self._clock()):
                raise UnauthenticatedError("this API key has expired", reason=EXPIRED_KEY)
            return Caller(holder=holder, peer=peer)
        if credentials.certificate_names and Role.PART in permission.roles:
            return Caller(holder=KeyHolder(name=credentials.certificate_names[0], role=Role.PART), peer=peer)
        if keys:
            raise UnauthenticatedError("this needs an API key, in the header `Authorization: Bearer KEY`")
        if permission.needed == Role.OPERATOR:
            if self._operator_peers or not credentials.is_local:
                raise NotAllowedError(
                    "this is for operators: callers on this machine, or with an operator's key (--api-key-file), or "
                    "over gRPC a certificate (--operator-peer)"
                )
            return Caller(holder=KeyHolder(role=Role.OPERATOR), peer=peer)
        return Caller(holder=KeyHolder(role=permission.needed), peer=peer)


def _object_of(scope: Mapping[str, Any]) -> str:
    """Return what an HTTP request is about: its path and query."""
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{scope['path']}?{query}" if query else str(scope["path"])


# What callers show, as HTTP and gRPC pass it on.


def key_in(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the key in `Authorization: Bearer KEY` or `x-api-key`; None without one."""
    authorization = headers.get(AUTHORIZATION)
    if authorization is not None and authorization[: len(BEARER)].lower() == BEARER:
        return authorization[len(BEARER) :].strip()
    given = headers.get(API_KEY)
    return None if given is None else given.strip()


def http_credentials(scope: Mapping[str, Any]) -> Credentials:
    """Read what the caller of an HTTP request shows, from its ASGI scope.

    A connection that its client has reset has no address any more, wherever it came from.
    """
    headers = dict(scope["headers"])
    host, port = scope.get("client") or ("", 0)
    return Credentials(
        key=key_in(headers),
        peer=f"{host}:{port}" if host else "unknown",
        is_local=is_loopback(host) and not is_from_other_site(headers),
    )


def grpc_credentials(context: Any) -> Credentials:
    """Read what the caller of a gRPC method shows."""
    headers: dict[bytes, bytes] = {}
    for name, value in context.invocation_metadata() or ():
        headers[name.encode()] = value.encode("latin-1", "replace") if isinstance(value, str) else value
    peer = unquote(context.peer())
    kind, _, address = peer.partition(":")
    return Credentials(
        key=key_in(headers),
        peer=address or kind,
        is_local=kind == "unix" or is_loopback(address.rpartition(":")[0].strip("[]")),
        certificate_names=certificate_names(context.auth_context()),
    )


def certificate_names(authentication: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names of a client certificate that gRPC has verified: its alternative names, or else its common one.

    CAs check alternative names; beside them, a common name may be any text.
    """
    return alternative_names(authentication) or _names(authentication, "x509_common_name")


def alternative_names(authentication: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the alternative names of a client certificate that gRPC has verified."""
    return _names(authentication, "x509_subject_alternative_name")


def _names(authentication: Mapping[str, Iterable[bytes]], kind: str) -> tuple[str, ...]:
    if b"ssl" not in authentication.get("transport_security_type", ()):
        return ()
    return tuple(dict.fromkeys(name.decode("utf-8", "replace") for name in authentication.get(kind, ())))


def is_loopback(host: str) -> bool:
    """Return whether an address is one of this machine that no other machine can have."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def is_from_other_site(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a browser sends this for a page of another site, which may reach a loopback port, too.

    A name in `Host` that is not `localhost` may be one that another site has pointed to this machine.
    """
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        other = bool(origin) and urlsplit(origin).netloc != host
    except ValueError:
        return True
    if other or headers.get(b"sec-fetch-site", b"same-origin") not in (b"same-origin", b"none"):
        return True
    return not (name in ("", "localhost") or _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
