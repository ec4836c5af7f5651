"""Compares forecasts by a new sidecar with the latencies of a real engine's requests."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from predictor.profile import Profile
from predictor.request import RequestFacts
from services.predictor_server.exported import ExportedEngine
from services.predictor_server.sidecar import to_wall_clock
from tests.deploy.engines import Engine
from tests.services.predictor_server.running_mirrors import forecast_by

T = TypeVar("T")
MAX_ERROR = 0.5  # median, as other tests share the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasting:
    """A sidecar of this process and the relative errors of its forecasts."""

    sidecar: ExportedEngine
    profile: Profile
    errors: list[float] = field(default_factory=list)

    async def compare(self, request: RequestFacts, sending: Awaitable[T]) -> T:
        """Forecast a request, send it, record the error of its latency, and return the reply."""
        forecast = to_wall_clock(forecast_by(self.sidecar, request), 1.0, self.profile.transit)
        started_s = asyncio.get_running_loop().time()
        reply = await sending
        real_s = asyncio.get_running_loop().time() - started_s
        self.errors.append(abs(forecast.e2e_s - real_s) / real_s)
        return reply

    def require_accuracy(self, learnt_from: int = 0) -> None:
        """Require a small median error; the first requests, from which the sidecar learns, do not count."""
        errors = self.errors[learnt_from:]
        assert statistics.median(errors) < MAX_ERROR, errors


@contextmanager
def forecasting(engine: Engine, profile: Profile) -> Iterator[Forecasting]:
    """Read an engine's state by a new sidecar within a context."""
    sidecar = ExportedEngine(str(engine.state), profile, "conditional_median", 60.0)
    try:
        yield Forecasting(sidecar=sidecar, profile=profile)
    finally:
        sidecar.close()
