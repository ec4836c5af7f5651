"""Connections of servers within the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.gateway import schedulers
from services.http.client import HttpClient
from services.http.engine_client import engine_client
from services.rpc.grpc_channel import GrpcChannel
from tests.services.waiting import PATIENCE_S


@pytest.fixture(scope="session", autouse=True)
def patient_connections() -> Iterator[None]:
    """Give connections the time that a busy machine needs; where no server listens, they are refused at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedulers, "CONNECT_S", PATIENCE_S)
        for function in (GrpcChannel.__init__, HttpClient.__init__, engine_client):
            patch.setitem(function.__kwdefaults__, "connect_s", PATIENCE_S)
        yield
