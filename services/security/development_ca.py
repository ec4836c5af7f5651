"""A CA and certificates for development and for clusters on one machine; production has a CA of its own."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.security.parts import part_name

CA_FILE, CA_KEY_FILE = "ca.crt", "ca.key"
DEFAULT_DAYS = 90
MAX_DAYS = 3650
EARLIER = dt.timedelta(minutes=5)  # clocks differ
PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A certificate and its private key, as PEM."""

    certificate: bytes
    key: bytes


def make_ca(days: float = DEFAULT_DAYS, *, name: str = "Block development CA") -> KeyPair:
    """Make a CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = (
        _builder(subject, key, days)
        .issuer_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _pair(builder.sign(key, hashes.SHA256()), key)


def make_certificate(ca: KeyPair, names: Sequence[str], days: float = DEFAULT_DAYS) -> KeyPair:
    """Make a certificate for DNS names, addresses and URIs, for servers and clients, signed by a CA."""
    ca_certificate = x509.load_pem_x509_certificate(ca.certificate)
    ca_key: Any = serialization.load_pem_private_key(ca.key, password=None)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(_name(names[0]), key, days)
        .issuer_name(ca_certificate.subject)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    return _pair(builder.sign(ca_key, hashes.SHA256()), key)


def self_signed(organization: str, days: float = MAX_DAYS) -> KeyPair:
    """Make a certificate for clients that do not verify it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, organization)])
    return _pair(_builder(subject, key, days).issuer_name(subject).sign(key, hashes.SHA256()), key)


def write_certificates(
    folder: Path, parts: Iterable[str], names: Sequence[str], days: float = DEFAULT_DAYS, *, force: bool = False
) -> list[Path]:
    """Write a certificate and a key for each part, signed by the folder's CA, which is made if there is none.

    Nothing is overwritten without `force`, and the CA never while it is valid.
    """
    if not 0 < days <= MAX_DAYS:
        raise ValueError(f"days: must lie above 0 and at most at {MAX_DAYS}, not {days:g}")
    for name in names:
        if not (name and name.isascii() and name.isprintable() and " " not in name):
            raise ValueError(f"name: {name!r} must be a DNS name in ASCII (xn--…), an address or a URI")
    targets = [(part, folder / f"{part}.crt", folder / f"{part}.key") for part in parts]
    existing = next((file for _, *files in targets for file in files if file.exists()), None)
    if existing is not None and not force:
        raise ValueError(f"folder: {existing} exists already; overwrite with --force, or name another folder")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca, written = _ca_in(folder)
    left = x509.load_pem_x509_certificate(ca.certificate).not_valid_after_utc - dt.datetime.now(dt.UTC)
    days = min(days, left / dt.timedelta(days=1))  # a certificate is worth nothing after its CA has expired
    for part, certificate_file, key_file in targets:
        made = make_certificate(ca, [part_name(part), part, *names], days)
        _write(certificate_file, made.certificate)
        _write(key_file, made.key)
        written += [certificate_file, key_file]
    return written


def is_valid(certificate_file: Path) -> bool:
    """Return whether a file has a certificate that has not expired."""
    if not certificate_file.exists():
        return False
    try:
        certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    except ValueError:
        raise ValueError(f"folder: {certificate_file} is no certificate in PEM") from None
    return certificate.not_valid_after_utc > dt.datetime.now(dt.UTC)


def _ca_in(folder: Path) -> tuple[KeyPair, list[Path]]:
    """Read the folder's CA; make one if there is none, or it has expired."""
    certificate_file, key_file = folder / CA_FILE, folder / CA_KEY_FILE
    if is_valid(certificate_file):
        return KeyPair(certificate=certificate_file.read_bytes(), key=_key_of(certificate_file, key_file)), []
    if key_file.exists() and not certificate_file.exists():
        raise ValueError(
            f"folder: {CA_FILE} is missing, the certificate of {key_file}; restore it, or name a new folder"
        )
    made = make_ca(MAX_DAYS)
    _write(key_file, made.key)
    _write(certificate_file, made.certificate)
    return made, [certificate_file, key_file]


def _key_of(certificate_file: Path, key_file: Path) -> bytes:
    """Read the private key of a CA; ValueError where it is missing, or that of another one."""
    certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    if not key_file.exists():
        raise ValueError(f"folder: {key_file} is missing, the key of {CA_FILE}; name a folder with both, or a new one")
    content = key_file.read_bytes()
    try:
        key: Any = serialization.load_pem_private_key(content, password=None)
        is_its_key = key.public_key() == certificate.public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        is_its_key = False
    if not is_its_key:
        raise ValueError(f"folder: {key_file} is not the key of {CA_FILE}, in PEM without a password")
    return content


def _write(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read; a reader finds the old content or the new one."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    fresh.rename(path)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + dt.timedelta(days=days)) - EARLIER)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _alternative(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return KeyPair(certificate=certificate.public_bytes(PEM), key=private)
