"""The picker's TLS certificate: from files, which may be renewed, or self-signed at the start."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import grpc

DAYS = 3650
KEY_FILE, CERTIFICATE_FILE = "tls.key", "tls.crt"


def server_credentials(cert_path: str) -> grpc.ServerCredentials:
    """Make credentials: of the files in a folder, read again when they change, or self-signed without a folder."""
    if not cert_path:
        return grpc.ssl_server_credentials([self_signed()])
    files = _CertificateFiles(Path(cert_path))
    return grpc.dynamic_ssl_server_credentials(files.configuration(), files.changed)  # type: ignore[arg-type]


def self_signed() -> tuple[bytes, bytes]:
    """Make a key and a certificate that proxies accept which do not verify it."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ValueError(
            "secure_serving: a self-signed certificate needs the package 'cryptography', which is not installed; "
            "install it, give --cert-path, or serve without TLS (--no-secure-serving)"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "Block endpoint picker")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=DAYS))
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    return (
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.public_bytes(encoding),
    )


class _CertificateFiles:
    """A key and a certificate in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pair = self._read()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return what was read last."""
        return grpc.ssl_server_certificate_configuration([self._pair])

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what the files have, where that is new; while they cannot be read, the last pair stays."""
        try:
            pair = self._read()
        except ValueError:
            return None
        if pair == self._pair:
            return None
        self._pair = pair
        return self.configuration()

    def _read(self) -> tuple[bytes, bytes]:
        try:
            pair = tuple((self._folder / name).read_bytes() for name in (KEY_FILE, CERTIFICATE_FILE))
        except OSError as error:
            raise ValueError(f"cert_path: {error.filename} cannot be read: {error.strerror}") from None
        key, certificate = pair
        if b"PRIVATE KEY" not in key or b"BEGIN CERTIFICATE" not in certificate:
            raise ValueError(f"cert_path: {self._folder} must have a key and a certificate in PEM")
        return key, certificate
