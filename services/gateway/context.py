"""What all requests of a gateway share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.gateway.destinations import Fallback, OutlierDetection
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.gateway.release_queue import ReleaseQueue
from services.gateway.retry_budget import RetryBudget
from services.gateway.schedulers import SchedulerClient
from services.gateway.settings import GatewaySettings
from services.http.client import HttpClient
from services.http.prompt_tokens import PromptSizes, PromptTokens


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
    loop: asyncio.AbstractEventLoop
