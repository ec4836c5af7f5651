"""TLS handshakes: what made one fail, in words; the check of the peer's names; counts and log lines of failures.

`CheckedContext` is a context of `ssl` whose handshakes are checked and counted, in asyncio and uvloop alike.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self, cast

from services.logs import log_event
from services.security.peer_names import is_allowed, names_in, not_allowed

log = logging.getLogger(__name__)

SERVER, CLIENT = SIDES = ("server", "client")
LOG_PAUSE_S = 10.0  # between two lines with the same reason

# What OpenSSL says about a peer's certificate, by the number of its verification error.
VERIFICATION = {
    9: ("not_yet_valid", "is not valid yet: check the clocks"),
    10: ("expired", "has expired: renew it"),
    18: ("unknown_ca", "is self-signed: add its CA to the CA file (--tls-ca)"),
    19: ("unknown_ca", "is signed by a CA that is not in the CA file (--tls-ca)"),
    20: ("unknown_ca", "is signed by a CA that is not in the CA file (--tls-ca)"),
    21: ("unknown_ca", "is signed by a CA that is not in the CA file (--tls-ca)"),
    23: ("revoked", "is revoked"),
    26: ("wrong_usage", "is not for this use: it must allow both server and client authentication"),
    62: ("wrong_name", "is for another name than the host of the address: add that name to it, or use --tls-peer"),
    64: ("wrong_name", "is for another address than that of the server: add the address to it, or use --tls-peer"),
}
# The other errors, by OpenSSL's name, and what they say about the peer.
OLD = ("old_protocol", "offers no TLS 1.2 or newer")
PLAIN = "plain_text"
PLAIN_TEXTS = {
    SERVER: "sends plain text to a port with TLS: use https://, or for parts of Block --tls-ca",
    CLIENT: "answers in plain text: it has no TLS",
}
ERRORS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": (
        "no_client_certificate",
        "presents no certificate: give it one (--tls-cert and --tls-key, or curl's --cert and --key)",
    ),
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": (
        "no_client_certificate",
        "requires a client certificate: give --tls-cert and --tls-key",
    ),
    "HTTP_REQUEST": (PLAIN, ""),
    "HTTPS_PROXY_REQUEST": (PLAIN, ""),
    "WRONG_VERSION_NUMBER": (PLAIN, ""),
    "RECORD_LAYER_FAILURE": (PLAIN, ""),
    "PACKET_LENGTH_TOO_LONG": (PLAIN, ""),
    "UNSUPPORTED_PROTOCOL": OLD,
    "VERSION_TOO_LOW": OLD,
    "TLSV1_ALERT_PROTOCOL_VERSION": ("old_protocol", "refuses our versions of TLS, which are 1.2 and newer"),
    "NO_SHARED_CIPHER": ("no_shared_cipher", "offers no cipher that is accepted here"),
    "TLSV1_ALERT_UNKNOWN_CA": ("refused_by_peer", "does not know the CA of our certificate"),
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": ("refused_by_peer", "refuses our certificate"),
    "SSLV3_ALERT_BAD_CERTIFICATE": ("refused_by_peer", "refuses our certificate"),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": ("refused_by_peer", "says that our certificate has expired: renew it"),
    "SSLV3_ALERT_CERTIFICATE_REVOKED": ("refused_by_peer", "says that our certificate is revoked"),
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": ("refused_by_peer", "does not accept our certificate for this use"),
    "SSLV3_ALERT_HANDSHAKE_FAILURE": ("refused_by_peer", "refuses the handshake; it may require a client certificate"),
    "TLSV1_ALERT_DECRYPT_ERROR": ("refused_by_peer", "refuses our certificate: its CA has another key"),
    "TLSV1_ALERT_ACCESS_DENIED": ("refused_by_peer", "refuses our certificate: its names are not allowed there"),
}
OTHER = "other"
REASONS = tuple(
    dict.fromkeys([one for one, _ in (*VERIFICATION.values(), *ERRORS.values())] + ["invalid", "not_allowed", OTHER])
)


class PeerNotAllowedError(ssl.SSLError):
    """A peer whose certificate is valid, and has none of the allowed names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeFailure:
    """Why a handshake failed: one of `REASONS`, and a text for people."""

    reason: str
    text: str


def failure_of(error: ssl.SSLError, side: str = CLIENT) -> HandshakeFailure:
    """Explain an error of TLS; `side` is ours."""
    peer = CLIENT if side == SERVER else SERVER
    if isinstance(error, PeerNotAllowedError):
        return HandshakeFailure(reason="not_allowed", text=str(error.args[-1]))
    if isinstance(error, ssl.SSLCertVerificationError):
        reason, text = VERIFICATION.get(error.verify_code, ("invalid", f"is invalid: {error.verify_message}"))
        if reason == "wrong_name" and error.verify_message:
            text = f"{text} ({error.verify_message})"
        return HandshakeFailure(reason=reason, text=f"the {peer}'s certificate {text}")
    name = error.reason or ""
    reason, text = ERRORS.get(name, (OTHER, f"ends TLS: {name.replace('_', ' ').lower() or error}"))
    return HandshakeFailure(reason=reason, text=f"the {peer} {PLAIN_TEXTS[side] if reason == PLAIN else text}")


def reason_in(error: Exception) -> str:
    """Say in one line what ended a connection, or kept it from being made."""
    if isinstance(error, ssl.SSLError):
        return failure_of(error).text
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class HandshakeLog:
    """Counts failed handshakes by side and reason, and logs those of servers, at most one line a reason in 10 s."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()  # gRPC calls from threads of its own
        self._counts: Counter[tuple[str, str]] = Counter()
        self._logged: dict[str, tuple[float, int]] = {}  # when, and the count at that time

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """How many failed, by side and reason."""
        with self._lock:
            return dict(self._counts)

    def failed(self, side: str, failure: HandshakeFailure) -> None:
        """Record a failure."""
        now_s = time.monotonic()
        with self._lock:
            self._counts[side, failure.reason] += 1
            total = self._counts[side, failure.reason]
            if side == CLIENT:  # whoever called says it
                return
            logged_s, logged_total = self._logged.get(failure.reason, (-LOG_PAUSE_S, 0))
            if now_s - logged_s < LOG_PAUSE_S:
                return
            self._logged[failure.reason] = now_s, total
        more = {"more": total - logged_total - 1} if total - logged_total > 1 else {}
        log_event(log, logging.WARNING, f"TLS handshake refused: {failure.text}", reason=failure.reason, **more)


class CheckedConnection(ssl.SSLObject):
    """A TLS connection whose handshake also checks the peer's names."""

    _outgoing: ssl.MemoryBIO
    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """Continue the handshake; a failure is recorded once."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
            self._require_allowed()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self._failure = error
            context = cast("CheckedContext", self.context)
            context.handshakes.failed(context.side, failure_of(error, context.side))
            if self.server_side and self._outgoing.pending:
                # The event loop sends what waits only before it reads on: the alert, by which the client learns why.
                raise ssl.SSLWantReadError from error
            raise

    def _require_allowed(self) -> None:
        context = cast("CheckedContext", self.context)
        if not context.peers:
            return
        names = names_in(self.getpeercert())
        if not is_allowed(names, context.peers):
            peer = CLIENT if context.side == SERVER else SERVER
            raise PeerNotAllowedError(1, not_allowed(peer, names, context.peers))


class CheckedContext(ssl.SSLContext):
    """A context of one side, with the names that peers may have; TLS 1.2 at least."""

    sslobject_class = CheckedConnection
    side: str
    peers: tuple[str, ...]
    handshakes: HandshakeLog

    @classmethod
    def of(cls, side: str, handshakes: HandshakeLog, *, alpn: str, peers: tuple[str, ...] = ()) -> Self:
        """Make a context without certificates."""
        made = cls(ssl.PROTOCOL_TLS_SERVER if side == SERVER else ssl.PROTOCOL_TLS_CLIENT)
        made.side, made.peers, made.handshakes = side, peers, handshakes
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        made.set_alpn_protocols([alpn])
        return made

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *arguments: Any, **options: Any
    ) -> CheckedConnection:
        """Make the TLS side of a connection."""
        made = cast("CheckedConnection", super().wrap_bio(incoming, outgoing, *arguments, **options))
        made._outgoing = outgoing  # noqa: SLF001 - its own class
        return made
