"""The address of a server, parsed from its URL."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A server's address, and a prefix of all its paths."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @cached_property
    def host_header(self) -> bytes:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = {"http": 80, "https": 443}[self.scheme]
        return (host if self.port == default else f"{host}:{self.port}").encode(
            "idna" if not host.isascii() else "ascii"
        )


@lru_cache(maxsize=4096)
def origin_of(url: str) -> Origin:
    """Parse a URL such as http://10.0.0.7:8000."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"{url!r}: is not a URL") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r}: must be a URL like http://10.0.0.7:8000")
    if parts.username is not None or parts.query or parts.fragment or not parts.path.isascii():
        raise ValueError(f"{url!r}: must have no user, query or fragment")
    if any(character <= " " for character in parts.path):
        raise ValueError(f"{url!r}: must have no spaces")
    default = 443 if parts.scheme == "https" else 80
    return Origin(scheme=parts.scheme, host=parts.hostname, port=port or default, prefix=parts.path.rstrip("/"))
