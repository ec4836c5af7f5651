"""A program's certificates: read from files, and read again when they change, for every handshake after that.

Connections that exist continue. While changed files cannot be used, those before them stay in use.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from services.logs import log_event
from services.security.handshakes import (
    CLIENT,
    SERVER,
    CheckedConnection,
    CheckedContext,
    HandshakeFailure,
    HandshakeLog,
)
from services.security.settings import ANY_ENGINE, NO_TLS, EngineAccessSettings, TlsSettings

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

CHECK_S = 1.0  # between two looks at the files
HTTP, HTTP2 = "http/1.1", "h2"
Seen = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFiles:
    """What is made of the files as they were at one time; `files` by the names of their settings."""

    files: Mapping[str, bytes]
    server: ssl.SSLContext | None  # None: servers use plain text
    rpc: ssl.SSLContext | None  # None: calls to other parts use plain text
    http: ssl.SSLContext  # of https:// URLs


class Certificates:
    """The files of some settings, and the contexts that are made of them."""

    def __init__(
        self,
        tls: TlsSettings,
        engines: EngineAccessSettings = ANY_ENGINE,
        handshakes: HandshakeLog | None = None,
    ) -> None:
        """Read the files; ValueError names the setting of one that cannot be used."""
        self.tls = tls
        self.handshakes = handshakes or HandshakeLog()
        self.num_failed_reloads = 0
        self._paths = {
            name: path
            for name, path in (
                ("tls_cert", tls.tls_cert),
                ("tls_key", tls.tls_key),
                ("tls_ca", tls.tls_ca),
                ("tls_client_cert", tls.tls_client_cert),
                ("tls_client_key", tls.tls_client_key),
                ("engine_ca", engines.engine_ca),
            )
            if path
        }
        self._lock = threading.Lock()  # gRPC reads from threads of its own
        self._checked_s = time.monotonic()
        self._seen = self._look()
        self._loaded = self._load()

    @property
    def loaded(self) -> LoadedFiles:
        """What the files hold now."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_S and self._lock.acquire(blocking=False):
            try:
                self._checked_s = now_s
                self._reload_if_changed()
            finally:
                self._lock.release()
        return self._loaded

    # Servers.

    @property
    def server_context(self) -> ssl.SSLContext | None:
        """The context of HTTP servers, whose handshakes use the files of their time; None for plain text."""
        return _FollowingContext.of(self, "server") if self.tls.serves_tls else None

    def grpc_server_credentials(self) -> grpc.ServerCredentials | None:
        """Make the credentials of a gRPC server; None for plain text."""
        if not self.tls.serves_tls:
            return None
        import grpc  # not needed by HTTP clients

        given = self.loaded

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            if self.loaded is given:
                return None
            given = self.loaded
            return self._configuration(given)

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(given),
            changed,  # type: ignore[arg-type]
            require_client_authentication=self.tls.verifies_clients,
        )

    def _configuration(self, loaded: LoadedFiles) -> grpc.ServerCertificateConfiguration:
        import grpc

        ca = loaded.files["tls_ca"] if self.tls.verifies_clients else None
        return grpc.ssl_server_certificate_configuration([(loaded.files["tls_key"], loaded.files["tls_cert"])], ca)

    # Clients.

    @property
    def rpc_context(self) -> ssl.SSLContext | None:
        """The context of calls to other parts; None for plain text."""
        return _FollowingContext.of(self, "rpc") if self.tls.tls_ca else None

    def lost_after_handshake(self, reason: str) -> str:
        """Say why a server may have closed a connection before its first message, and count it."""
        if not self.tls.tls_ca:
            return f"{reason}; if it uses TLS, give --tls-ca"
        self.handshakes.failed(CLIENT, HandshakeFailure(reason="refused_by_peer", text=reason))
        if not self.tls.client_pair[0]:
            return f"{reason} after the TLS handshake; it requires a client certificate: give --tls-cert and --tls-key"
        return f"{reason} after the TLS handshake; it refuses our certificate: expired, or of a CA unknown there"

    @property
    def http_context(self) -> ssl.SSLContext:
        """The context of requests to https:// URLs."""
        return _FollowingContext.of(self, "http")

    # Files.

    def not_after(self) -> dict[str, float]:
        """When each certificate expires, by its use, in Unix time; of a file with several, the first that does."""
        from cryptography import x509

        files, found = self.loaded.files, {}
        for name in ("tls_cert", "tls_ca", "tls_client_cert", "engine_ca"):
            with suppress(ValueError):  # of a certificate that OpenSSL accepts and this library does not
                certificates = x509.load_pem_x509_certificates(files.get(name, b""))
                found[name.removeprefix("tls_")] = min(one.not_valid_after_utc.timestamp() for one in certificates)
        return found

    def _look(self) -> Seen:
        return tuple(_signature(path) for path in self._paths.values())

    def _reload_if_changed(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._loaded = self._load()
        except (OSError, ValueError) as error:  # OSError: a file was removed after it was read
            self.num_failed_reloads += 1
            log_event(log, logging.ERROR, "certificates changed, and cannot be used; the old ones stay", reason=error)
            return
        expiries = {use: datetime.fromtimestamp(at, UTC).isoformat() for use, at in self.not_after().items()}
        log_event(log, logging.INFO, "certificates are read again", expiries=expiries)

    def _load(self) -> LoadedFiles:
        files = {name: _read(name, path) for name, path in self._paths.items()}
        tls = self.tls
        server = self._context(SERVER, HTTP, ca="tls_ca" if tls.verifies_clients else "") if tls.serves_tls else None
        rpc = self._context(CLIENT, HTTP2, ca="tls_ca") if tls.tls_ca else None
        http = self._context(CLIENT, HTTP, ca=next((name for name in ("engine_ca", "tls_ca") if name in files), ""))
        return LoadedFiles(files=files, server=server, rpc=rpc, http=http)

    def _context(self, side: str, alpn: str, *, ca: str) -> ssl.SSLContext:
        """Make a context that verifies peers by the file of the setting `ca`."""
        peers = self.tls.tls_peers if ca == "tls_ca" else ()
        context = CheckedContext.of(side, self.handshakes, alpn=alpn, peers=peers)
        if side == SERVER:
            pair, name = (self.tls.tls_cert, self.tls.tls_key), "tls_cert"
            context.num_tickets = 0 if ca else 2  # a resumed session would not verify the client again
            context.options |= ssl.OP_NO_TICKET if ca else 0
            context.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
        else:
            pair, name = self.tls.client_pair, "tls_client_cert" if self.tls.tls_client_cert else "tls_cert"
            context.check_hostname = not peers
        if pair[0]:
            _load_pair(context, name, pair)
        if ca:
            _load_ca(context, ca, self._paths[ca])
        elif side == CLIENT:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return context


class _FollowingContext(ssl.SSLContext):
    """A context for each of whose handshakes the files are looked at."""

    _certificates: Certificates
    _use: str

    @classmethod
    def of(cls, certificates: Certificates, use: str) -> _FollowingContext:
        made = cls(ssl.PROTOCOL_TLS_SERVER if use == "server" else ssl.PROTOCOL_TLS_CLIENT)
        made._certificates, made._use = certificates, use
        return made

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *arguments: Any, **options: Any
    ) -> CheckedConnection:
        """Make the TLS side of a connection by the files as they are now."""
        context: CheckedContext = getattr(self._certificates.loaded, self._use)
        return context.wrap_bio(incoming, outgoing, *arguments, **options)


def _signature(path: str) -> tuple[int, int, int] | None:
    """Describe a file so that a change shows, that of a link to it included; None where there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error.strerror}") from None


def _load_pair(context: ssl.SSLContext, name: str, pair: tuple[str, str]) -> None:
    key_name = name.removesuffix("cert") + "key"
    try:
        context.load_cert_chain(*pair, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"{key_name}: {pair[1]} is not the key of the certificate {pair[0]}") from None
        files = f"{pair[0]} and {pair[1]}"
        raise ValueError(f"{name}: {files} are no certificate and key in PEM without a password") from None


def _no_password() -> str:
    """Answer OpenSSL for a key with a password, which would otherwise ask on the terminal."""
    return ""


def _load_ca(context: ssl.SSLContext, name: str, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ValueError(f"{name}: {path} holds no CA certificates in PEM") from None


class _Process:
    """The certificates of this process: servers and clients with the same settings share them."""

    made: ClassVar[dict[TlsSettings, Certificates]] = {}
    handshakes = HandshakeLog()
    tls = NO_TLS
    engines = ANY_ENGINE


def use_tls(tls: TlsSettings, engines: EngineAccessSettings = ANY_ENGINE) -> None:
    """Have all clients of this process use these settings where they are given no others."""
    _Process.made[tls] = Certificates(tls, engines, _Process.handshakes)
    _Process.tls, _Process.engines = tls, engines


def certificates_of(tls: TlsSettings) -> Certificates:
    """Return the certificates of some settings."""
    if tls not in _Process.made:
        _Process.made[tls] = Certificates(tls, handshakes=_Process.handshakes)
    return _Process.made[tls]


def own_certificates() -> Certificates:
    """Return the certificates that clients of this process use."""
    return certificates_of(_Process.tls)


def engine_access() -> EngineAccessSettings:
    """Return how this process reaches engines."""
    return _Process.engines
