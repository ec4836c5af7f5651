"""What may listen beyond this machine: servers with TLS, gateways with API keys, and what is declared insecure."""

from __future__ import annotations

from services.security.access import is_loopback
from services.security.settings import TlsSettings


def is_on_loopback(host: str) -> bool:
    """Return whether a server that listens on this host is reached from this machine only."""
    return host == "localhost" or is_loopback(host.strip("[]"))


def require_tls_beyond_loopback(host: str, tls: TlsSettings, field: str = "host", *, plain: bool = False) -> None:
    """Refuse a server that other machines reach in plain text, which one that is `plain` always has."""
    if not ((tls.serves_tls and not plain) or tls.insecure or is_on_loopback(host)):
        raise ValueError(
            f"{field}: {host} is reached from other machines, in plain text: give --tls-cert and --tls-key (and "
            "--tls-ca), or --insecure where the network is trusted"
        )


def require_keys_beyond_loopback(host: str, tls: TlsSettings, *, has_keys: bool) -> None:
    """Refuse a gateway that anybody on other machines may use."""
    if not (has_keys or tls.verifies_clients or tls.insecure or is_on_loopback(host)):
        raise ValueError(
            f"api_key_file: is missing, and {host} is reached from other machines: give API keys, or --insecure where "
            "every client is trusted"
        )
