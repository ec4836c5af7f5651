"""Connections of servers within the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.gateway import schedulers
from services.http.client import HttpClient
from services.rpc.grpc_channel import GrpcChannel
from tests.services.waiting import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def patient_connections() -> Iterator[None]:
    """Give connections the time that a busy machine needs; where no server listens, they are refused at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedulers, "CONNECT_S", PATIENCE_S)
        for kind in (GrpcChannel, HttpClient):
            patch.setitem(kind.__init__.__kwdefaults__, "connect_s", PATIENCE_S)
        yield
