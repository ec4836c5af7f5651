"""The HTTP client of requests to engines: by this process's certificates, and with the engines' API key."""

from __future__ import annotations

from services.http.client import HttpClient
from services.security.certificates import engine_access
from services.security.own_key import own_key


def engine_client(*, connect_s: float = 2.0) -> HttpClient:
    """Make a client."""
    key = own_key(engine_access().engine_api_key_file)

    def authorization() -> bytes:
        return b"".join(f"{name}: {value}\r\n".encode() for name, value in key.metadata())

    return HttpClient(connect_s=connect_s, authorization=authorization if key else None)
