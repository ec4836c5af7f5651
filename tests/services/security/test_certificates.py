"""Settings of TLS and files that cannot be used, names of peers, and what expires when."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from prometheus_client import CollectorRegistry, generate_latest

from services.emulator.settings import EmulatorSettings
from services.rpc.settings import ServerSettings
from services.security.certificates import Certificates
from services.security.exposure import is_on_loopback, require_keys_beyond_loopback
from services.security.handshakes import CLIENT, SERVER, HandshakeFailure
from services.security.metrics import register_tls_metrics
from services.security.peer_names import is_allowed
from services.security.settings import NO_TLS, EngineAccessSettings, TlsSettings
from tests.services.security.authorities import Authority

DAY_S = 86400.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tls_cert": "a"}, "tls_key: is missing"),
        ({"tls_key": "a"}, "tls_cert: is missing"),
        ({"tls_client_cert": "a"}, "tls_client_key: is missing"),
        ({"tls_peers": ("a",)}, "tls_ca: is missing"),
        ({"tls_ca": "a", "tls_peers": ("a*",)}, "tls_peer: 'a\\*' must be"),
        ({"tls_ca": "a", "tls_peers": ("*.",)}, "tls_peer: "),
        ({"tls_client_auth": "perhaps"}, "tls_client_auth: must be one of"),
    ],
)
def test_settings_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    """The message begins with the setting."""
    with pytest.raises(ValueError, match=f"^{message}"):
        TlsSettings(**fields)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """The message begins with the setting, and names the file."""
    ca, other = Authority(folder=tmp_path / "ca"), Authority(folder=tmp_path / "other")
    ca.issue("server")
    other.issue("server")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("nothing")
    good = {"tls_cert": str(ca.folder / "server.crt"), "tls_key": str(ca.folder / "server.key")}
    for changed, message in (
        ({"tls_cert": "/nowhere.crt"}, "tls_cert: /nowhere.crt cannot be read: No such file"),
        ({"tls_key": str(other.folder / "server.key")}, "tls_key: .* is not the key of the certificate"),
        ({"tls_cert": str(garbage)}, "tls_cert: .*garbage.pem and .* are no certificate and key"),
        ({"tls_ca": str(garbage)}, "tls_ca: .*garbage.pem holds no CA certificates"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            Certificates(TlsSettings(**{**good, **changed}))
    key = serialization.load_pem_private_key((ca.folder / "server.key").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    (ca.folder / "server.key").write_bytes(locked)
    with pytest.raises(ValueError, match="^tls_cert: .* without a password"):
        Certificates(TlsSettings(**good))


@pytest.mark.parametrize(
    ("names", "patterns", "allowed"),
    [
        (["a.b"], [], True),
        ([], ["a.b"], False),
        (["a.b"], ["a.b"], True),
        (["A.B"], ["a.b"], True),
        (["a.b"], ["*.b"], True),
        (["x.a.b"], ["*.b"], False),
        (["b"], ["*.b"], False),
        ([".b"], ["*.b"], False),
        (["a.b", "c"], ["d", "c"], True),
        (["spiffe://x/ns/y"], ["spiffe://x/ns/y"], True),
        (["spiffe://x/ns/Y"], ["spiffe://x/ns/y"], False),
        (["10.0.0.7"], ["10.0.0.7"], True),
    ],
)
def test_names_of_peers(names: list[str], patterns: list[str], *, allowed: bool) -> None:
    """One of the names is on the list; a star stands for one label."""
    assert is_allowed(names, patterns) is allowed


def test_metrics_tell_expiry_and_failures(tmp_path: Path) -> None:
    """Each certificate has its time; handshakes are counted by side and reason."""
    ca = Authority(folder=tmp_path)
    ca.issue("server", days=3.0)
    certificates = Certificates(ca.settings("server"))
    for side, reason in ((SERVER, "expired"), (SERVER, "expired"), (CLIENT, "wrong_name")):
        certificates.handshakes.failed(side, HandshakeFailure(reason=reason, text="text"))
    registry = CollectorRegistry()
    register_tls_metrics(registry, certificates)
    lines = dict(line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
    at_s = float(lines['block_tls_certificate_not_after_timestamp_seconds{use="cert"}'])
    assert at_s == pytest.approx(time.time() + 3 * DAY_S, abs=600)
    assert float(lines['block_tls_certificate_not_after_timestamp_seconds{use="ca"}']) > at_s
    assert lines['block_tls_handshake_failures_total{reason="expired",side="server"}'] == "2.0"
    assert lines['block_tls_handshake_failures_total{reason="wrong_name",side="client"}'] == "1.0"
    assert lines["block_tls_reload_failures_total"] == "0.0"
    plain = CollectorRegistry()
    register_tls_metrics(plain, Certificates(NO_TLS))
    assert generate_latest(plain) == b""


def test_servers_beyond_this_machine(tmp_path: Path) -> None:
    """They need TLS, or a flag that says that they have none; gateways need keys, too."""
    ca = Authority(folder=tmp_path)
    ca.issue("server")
    for host in ("127.0.0.1", "127.0.0.9", "::1", "[::1]", "localhost"):
        assert is_on_loopback(host)
        ServerSettings(host=host)
    tls = ca.settings("server", tls_client_auth="none")
    for host in ("0.0.0.0", "::", "10.0.0.7", "gateway.example"):  # noqa: S104
        assert not is_on_loopback(host)
        with pytest.raises(ValueError, match=f"^host: {host} .* --tls-cert .* --insecure"):
            ServerSettings(host=host)
        with pytest.raises(ValueError, match=f"^host: {host} "):
            EmulatorSettings(host=host, model="tiny")
        ServerSettings(host=host, tls=tls)
        ServerSettings(host=host, tls=TlsSettings(insecure=True))
        with pytest.raises(ValueError, match="^api_key_file: is missing.*--insecure"):
            require_keys_beyond_loopback(host, tls, has_keys=False)
        require_keys_beyond_loopback(host, tls, has_keys=True)
        require_keys_beyond_loopback(host, ca.settings("server"), has_keys=False)
        require_keys_beyond_loopback(host, TlsSettings(insecure=True), has_keys=False)
    require_keys_beyond_loopback("127.0.0.1", NO_TLS, has_keys=False)


def test_files_of_engine_access_exist() -> None:
    """The message begins with the setting."""
    with pytest.raises(ValueError, match="^engine_ca: /nowhere: is no file"):
        EngineAccessSettings(engine_ca="/nowhere")
