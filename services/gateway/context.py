"""What all requests of a gateway share: its parts, and the budgets of their retries and migrations."""

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
from services.http.prompt_tokens import PromptTokens
from services.instances.draining_requests import DrainingRequests
from services.objectives import ObjectiveTable
from services.retry_budget import RetryBudget

if TYPE_CHECKING:
    from services.tracing.spans import RequestTracer


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    """The parts of a gateway that outlive a request."""

    settings: GatewaySettings
    metrics: GatewayMetrics
    schedulers: SchedulerClient
    engines: HttpClient
    releases: ReleaseQueue
    budget: RetryBudget  # of retries before the first byte
    migrations: RetryBudget  # of streams that continue on another engine
    requests: DrainingRequests
    prompts: PromptTokens
    last_resort: Fallback
    failed_lately: OutlierDetection
    models: Models
    announced: AnnouncedPaths
    kept: KeptResponses
    objectives: ObjectiveTable
    loop: asyncio.AbstractEventLoop
    tracer: RequestTracer | None = None  # without, nothing is traced
