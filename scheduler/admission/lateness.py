"""When a request becomes too late for its deadlines, and when a refused one may come again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from scheduler.candidates import Candidates
from scheduler.placement import PlacementRequest

if TYPE_CHECKING:
    from scheduler.core import SchedulerCore

MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 3600.0


def latest_start_s(
    core: SchedulerCore, request: PlacementRequest, compared: Candidates | None, *, asked_all: bool
) -> float:
    """Return the latest time at which an instance could start the request and deliver its first token in time.

    If all instances have just been asked, their queues count; otherwise an idle instance is assumed. A request that
    waits longer is late, and makes those behind it late as well.
    """
    due_s, prompt_tokens = request.indicators.due_s, request.indicators.prompt_tokens
    if due_s == math.inf:
        return due_s
    if compared is not None and "predicted_queue_s" in compared.columns:
        ttft_s = compared["predicted_ttft_s"]
        least_s = float(np.fmin.reduce(ttft_s - compared["predicted_queue_s"], initial=math.inf))
        if least_s < math.inf:
            core.observe_prefill(least_s / max(1, prompt_tokens))
            if asked_all:
                return due_s - float(np.fmin.reduce(ttft_s))
    return due_s - core.least_prefill_token_s * prompt_tokens


def retry_after_s(core: SchedulerCore, request: PlacementRequest, compared: Candidates | None, now_s: float) -> float:
    """Return the seconds until a request like this one may be admitted in time, after those that wait."""
    is_best_effort, slo = request.objective.is_best_effort, request.objective.slo
    ttft_s = math.inf
    if compared is not None and len(compared) and "predicted_ttft_s" in compared.columns:
        ttft_s = float(np.fmin.reduce(compared["predicted_ttft_s"], initial=math.inf))
    if not math.isfinite(ttft_s):
        ttft_s = 0.0
    late_s = 0.0 if slo.ttft_s is None else ttft_s - slo.ttft_s
    queue = core.queue(request.model)
    rate = core.shares_of(request.model).tokens_per_s(now_s, real_time_only=not is_best_effort)
    queued_s = 0.0
    if queue is not None and rate > 0:
        tokens, all_left_s = queue.backlog(now_s, background=is_best_effort)
        queued_s = min(tokens / rate, all_left_s - ttft_s)
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, queued_s, late_s))
