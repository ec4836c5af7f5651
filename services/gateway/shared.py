"""What all requests of a gateway share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.front.prompt_sizes import PromptSizes
from services.front.prompt_tokens import PromptTokens
from services.gateway.metrics import Metrics
from services.gateway.models import Models
from services.gateway.places import FailedLately, LastResort
from services.gateway.releases import Releases
from services.gateway.retries import RetryBudget
from services.gateway.schedulers import Schedulers
from services.gateway.settings import GatewaySettings
from services.http_client import HttpClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The parts of a gateway that outlive a request."""

    settings: GatewaySettings
    metrics: Metrics
    schedulers: Schedulers
    engines: HttpClient
    releases: Releases
    budget: RetryBudget
    sizes: PromptSizes
    prompts: PromptTokens
    last_resort: LastResort
    failed_lately: FailedLately
    models: Models
    loop: asyncio.AbstractEventLoop
