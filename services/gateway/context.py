"""What all requests of a gateway share: its parts, and the budget of their retries."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.gateway.announced_paths import AnnouncedPaths
from services.gateway.destinations import Fallback, OutlierDetection
from services.gateway.kept_responses import KeptResponses
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.gateway.release_queue import ReleaseQueue
from services.gateway.schedulers import SchedulerClient
from services.gateway.settings import GatewaySettings
from services.http.client import HttpClient
from services.http.prompt_tokens import PromptSizes, PromptTokens
from services.objectives import ObjectiveTable

if TYPE_CHECKING:
    from services.tracing.spans import RequestTracer


class RetryBudget:
    """A bucket of retries: full at first, and each request adds a fraction of one.

    One engine's failure costs one retry for each request that it had, and these must be possible; a failure of all
    engines must not multiply the load.
    """

    def __init__(self, *, max_retries: int, per_request: float) -> None:
        """Start full."""
        self._max_retries = float(max_retries)
        self._left = float(max_retries)
        self._per_request = per_request

    def earn(self) -> None:
        """Count a request."""
        self._left = min(self._max_retries, self._left + self._per_request)

    def spend(self) -> bool:
        """Take a retry; False where none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    """The parts of a gateway that outlive a request."""

    settings: GatewaySettings
    metrics: GatewayMetrics
    schedulers: SchedulerClient
    engines: HttpClient
    releases: ReleaseQueue
    budget: RetryBudget
    sizes: PromptSizes
    prompts: PromptTokens
    last_resort: Fallback
    failed_lately: OutlierDetection
    models: Models
    announced: AnnouncedPaths
    kept: KeptResponses
    objectives: ObjectiveTable
    loop: asyncio.AbstractEventLoop
    tracer: RequestTracer | None = None  # without, nothing is traced
