"""Settings of TLS: a program's certificate, the CA of its peers, and the names that peers may have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from predictor.suggestions import require_choice
from services.security.peer_names import require_pattern
from services.settings import Option

REQUIRED, NONE = CLIENT_AUTH = ("required", "none")
SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Certificates as PEM files, which are read again when they change; without any, connections are plain text."""

    tls_cert: Annotated[
        str,
        Option(
            "Certificate of this program, with its intermediate CAs: its ports serve TLS. Read again when it changes.",
            metavar="FILE",
        ),
    ] = ""
    tls_key: Annotated[str, Option("Private key of --tls-cert.", metavar="FILE")] = ""
    tls_ca: Annotated[
        str,
        Option(
            "CA certificates that verify other parts of Block: calls to them use TLS, and clients have to present a "
            "certificate (see --tls-client-auth).",
            metavar="FILE",
        ),
    ] = ""
    tls_peers: Annotated[
        tuple[str, ...],
        Option(
            "Name that the certificate of a peer verified by --tls-ca must have, a DNS name or a URI; *.NAME stands "
            "for one label before NAME. Repeatable: any of them. With it, the host of a server's address need not be "
            "in the server's certificate.",
            name="tls_peer",
            separator=",",
            unset="clients may have any name; a server must have that of its address",
        ),
    ] = ()
    tls_client_auth: Annotated[
        str,
        Option("Whether clients must present a certificate, where --tls-ca is set.", choices=CLIENT_AUTH),
    ] = REQUIRED
    tls_client_cert: Annotated[
        str,
        Option("Certificate to present to servers, where it is not --tls-cert.", metavar="FILE", unset="--tls-cert"),
    ] = ""
    tls_client_key: Annotated[str, Option("Private key of --tls-client-cert.", metavar="FILE", unset="--tls-key")] = ""
    insecure: Annotated[
        bool,
        Option(
            "Listen beyond this machine (--host) without TLS, and as a gateway without API keys.",
            negative="--no-insecure",
        ),
    ] = False

    def __post_init__(self) -> None:
        """Refuse incomplete settings."""
        for one, other in (("tls_cert", "tls_key"), ("tls_client_cert", "tls_client_key")):
            if bool(getattr(self, one)) != bool(getattr(self, other)):
                missing = other if getattr(self, one) else one
                raise ValueError(f"{missing}: is missing; a certificate and its private key go together")
        if self.tls_peers and not self.tls_ca:
            raise ValueError("tls_ca: is missing; without it no certificate is verified, whatever its names (tls_peer)")
        require_choice("tls_client_auth", self.tls_client_auth, CLIENT_AUTH)
        for name in self.tls_peers:
            require_pattern("tls_peer", name)

    @property
    def serves_tls(self) -> bool:
        """Return whether servers use TLS."""
        return bool(self.tls_cert)

    @property
    def verifies_clients(self) -> bool:
        """Return whether clients must present a certificate."""
        return bool(self.tls_cert and self.tls_ca) and self.tls_client_auth == REQUIRED

    @property
    def client_pair(self) -> tuple[str, str]:
        """The certificate and the key that servers are shown; empty without any."""
        if self.tls_client_cert:
            return self.tls_client_cert, self.tls_client_key
        return self.tls_cert, self.tls_key


NO_TLS = TlsSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAccessSettings:
    """How engines are reached whose URLs begin with https://, or that want an API key."""

    engine_ca: Annotated[
        str,
        Option(
            "CA certificates that verify engines with https:// URLs.",
            metavar="FILE",
            unset="--tls-ca, or else the system's",
        ),
    ] = ""
    engine_api_key_file: Annotated[
        str,
        Option(
            "File with the API key to send to engines (vllm serve --api-key), in place of the client's. Read again "
            "when it changes.",
            metavar="FILE",
        ),
    ] = ""

    engine_scheme: Annotated[
        str,
        Option(
            "Scheme of the URLs of engines that are known by their addresses: by DNS, as pods, or as a provisioner's.",
            choices=SCHEMES,
        ),
    ] = "http"

    def __post_init__(self) -> None:
        """Refuse a file that does not exist."""
        for name in ("engine_ca", "engine_api_key_file"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ValueError(f"{name}: {path}: is no file that can be read")
        require_choice("engine_scheme", self.engine_scheme, SCHEMES)


ANY_ENGINE = EngineAccessSettings()
