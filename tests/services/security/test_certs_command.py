"""`block certs`: a CA and certificates that nobody else can read, and that nothing overwrites by itself."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from services.cluster.link_security import LinkSecurity
from services.security.certificates import Certificates
from services.security.development_ca import KeyPair, is_valid, make_certificate
from services.security.settings import TlsSettings
from tests.services.cli.running import answer, refusal


def test_files_are_private_and_complete(tmp_path: Path) -> None:
    """Each part has a certificate of the CA with its name, and keys are for their owner alone."""
    folder = tmp_path / "tls"
    written = answer("certs", str(folder), "--name", "10.0.0.7", "--name", "spiffe://test/block", "--days", "5")
    assert written["ca"] == str(folder / "ca.crt")
    assert {Path(path).name for path in written["files"]} >= {"ca.crt", "ca.key", "gateway.crt", "gateway.key"}
    assert all(stat.S_IMODE(Path(path).stat().st_mode) == 0o600 for path in written["files"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    certificate = x509.load_pem_x509_certificate((folder / "gateway.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"gateway.block.internal", "gateway", "localhost"} <= set(names.get_values_for_type(x509.DNSName))
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://test/block"]
    for part in ("gateway", "client"):
        Certificates(
            TlsSettings(
                tls_cert=str(folder / f"{part}.crt"),
                tls_key=str(folder / f"{part}.key"),
                tls_ca=str(folder / "ca.crt"),
            )
        )


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    """With it, the certificates change and the CA stays."""
    answer("certs", str(tmp_path), "--part", "gateway")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "folder: " in refusal("certs", str(tmp_path))
    assert "--force" in refusal("certs", str(tmp_path), "--part", "gateway")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    answer("certs", str(tmp_path), "--part", "gateway", "--force")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"gateway.crt", "gateway.key"}
    answer("certs", str(tmp_path), "--part", "tagger")  # another part, by the same CA
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    assert len(context.get_ca_certs()) == 1


def test_a_valid_ca_is_never_replaced(tmp_path: Path) -> None:
    """Certificates for as long as the CA, or longer, expire with it; without its key, or with another, none is made."""
    answer("certs", str(tmp_path), "--part", "gateway", "--days", "3650")
    ca = (tmp_path / "ca.crt").read_bytes()
    answer("certs", str(tmp_path), "--part", "tagger", "--days", "3650")
    assert (tmp_path / "ca.crt").read_bytes() == ca
    tagger, gateway, authority = (
        x509.load_pem_x509_certificate((tmp_path / f"{name}.crt").read_bytes()) for name in ("tagger", "gateway", "ca")
    )
    assert max(tagger.not_valid_after_utc, gateway.not_valid_after_utc) <= authority.not_valid_after_utc
    key = (tmp_path / "ca.key").read_bytes()
    (tmp_path / "ca.key").write_bytes((tmp_path / "tagger.key").read_bytes())
    assert "ca.key is not the key of ca.crt" in refusal("certs", str(tmp_path), "--part", "engine")
    (tmp_path / "ca.key").unlink()
    assert "ca.key is missing" in refusal("certs", str(tmp_path), "--part", "engine")
    (tmp_path / "ca.key").write_bytes(key)
    (tmp_path / "ca.crt").unlink()
    assert "ca.crt is missing" in refusal("certs", str(tmp_path), "--part", "engine")
    assert (tmp_path / "ca.key").read_bytes() == key
    (tmp_path / "ca.crt").write_bytes(ca)
    answer("certs", str(tmp_path), "--part", "engine")
    assert (tmp_path / "ca.crt").read_bytes() == ca


def test_a_cluster_renews_expired_certificates_of_its_folder(tmp_path: Path) -> None:
    """A part whose certificate has expired gets another one; those of the other parts and the CA stay."""
    LinkSecurity.in_folder(tmp_path, "127.0.0.1")
    ca = KeyPair(certificate=(tmp_path / "ca.crt").read_bytes(), key=(tmp_path / "ca.key").read_bytes())
    expired = make_certificate(ca, ["gateway.block.internal"], days=-1.0)
    (tmp_path / "gateway.crt").write_bytes(expired.certificate)
    (tmp_path / "gateway.key").write_bytes(expired.key)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    LinkSecurity.in_folder(tmp_path, "127.0.0.1")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"gateway.crt", "gateway.key"}
    assert is_valid(tmp_path / "gateway.crt")
    Certificates(LinkSecurity(folder=tmp_path).settings("gateway"))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--days", "0"], "days: "),
        (["--days", "9999"], "days: "),
        (["--name", ""], "name: ''"),
        (["--name", "bücher.test"], "name: 'bücher.test'"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path: Path, flags: list[str], named: str) -> None:
    """The line of the error names the option."""
    assert named in refusal("certs", str(tmp_path), *flags)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """The line of the error names it."""
    (tmp_path / "file").write_text("")
    assert f"folder: {tmp_path / 'file'}" in refusal("certs", str(tmp_path / "file" / "folder"))
