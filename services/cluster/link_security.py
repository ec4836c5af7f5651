"""The certificates of a cluster on one machine, and which part may talk with which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.security.certificates import Certificates
from services.security.exposure import is_on_loopback
from services.security.parts import LOCAL_NAMES, part_name
from services.security.settings import TlsSettings

# Whose certificates each part accepts, of its clients and of its servers; `client` is whoever operates the cluster.
DECIDING = ("engine", "predictor", "tagger", "provisioner", "scheduler", "gateway", "client")
PEERS: Mapping[str, Sequence[str]] = {
    "gateway": DECIDING,
    "scheduler": DECIDING,
    "predictor": ("engine", "scheduler", "gateway", "provisioner", "client"),
    "tagger": ("scheduler", "gateway", "client"),
    "provisioner": ("predictor", "scheduler", "gateway", "client"),
    "engine": ("predictor", "scheduler", "gateway", "provisioner", "client"),
    "client": ("engine", "predictor", "tagger", "provisioner", "scheduler", "gateway"),
}
CERT_REQUIRED = 2  # vLLM's --ssl-cert-reqs, as Python's ssl numbers it


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSecurity:
    """A folder with a CA, and with a certificate and a key of each part."""

    folder: Path

    @classmethod
    def in_folder(cls, folder: Path, host: str) -> LinkSecurity:
        """Use the certificates of a folder; those that are missing or have expired are made."""
        from services.security.development_ca import is_valid, write_certificates

        missing = [part for part in PEERS if not is_valid(folder / f"{part}.crt")]
        if missing:
            names = LOCAL_NAMES if is_on_loopback(host) else (*LOCAL_NAMES, host)
            known = [name for name in names if name not in {"0.0.0.0", "::"}]  # noqa: S104
            write_certificates(folder, missing, known, force=True)
        return cls(folder=folder)

    @property
    def ca_file(self) -> Path:
        """The certificate of the CA."""
        return self.folder / "ca.crt"

    def settings(self, part: str) -> TlsSettings:
        """Return the settings of a part."""
        return TlsSettings(
            tls_cert=str(self.folder / f"{part}.crt"),
            tls_key=str(self.folder / f"{part}.key"),
            tls_ca=str(self.ca_file),
            tls_peers=tuple(part_name(peer) for peer in PEERS[part]),
        )

    def flags(self, part: str) -> tuple[str, ...]:
        """Write the settings of a part as flags."""
        tls = self.settings(part)
        peers = (word for name in tls.tls_peers for word in ("--tls-peer", name))
        return "--tls-cert", tls.tls_cert, "--tls-key", tls.tls_key, "--tls-ca", tls.tls_ca, *peers

    def vllm_flags(self) -> tuple[str, ...]:
        """Write the settings of an engine as flags of vLLM, which checks no names of clients."""
        tls = self.settings("engine")
        files = ("--ssl-certfile", tls.tls_cert, "--ssl-keyfile", tls.tls_key, "--ssl-ca-certs", tls.tls_ca)
        return *files, "--ssl-cert-reqs", str(CERT_REQUIRED)

    def client(self) -> Certificates:
        """Return the certificates of the process that runs the cluster."""
        return Certificates(self.settings("client"))
