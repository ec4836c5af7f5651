"""What all tests of the gateway have in common."""

from __future__ import annotations

import math

import pytest


@pytest.fixture(autouse=True)
def _no_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass targets and bodies as they came, although a busy machine keeps a request for a while."""
    for module in ("services.http.engine_arguments", "services.gateway.incoming"):
        monkeypatch.setattr(f"{module}.LONG_WAIT_S", math.inf)
