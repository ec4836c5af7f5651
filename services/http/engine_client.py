"""The HTTP client of requests to engines: by this process's certificates, and with the engines' API key."""

from __future__ import annotations

from services.http.client import HttpClient
from services.security.certificates import engine_access
from services.security.engine_key import EngineKey


def engine_client(*, connect_s: float = 2.0) -> HttpClient:
    """Make a client."""
    path = engine_access().engine_api_key_file
    return HttpClient(connect_s=connect_s, authorization=EngineKey(path).header if path else None)
