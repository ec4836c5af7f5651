"""The capacity of an instance, estimated from placed requests: their lengths, and token time by concurrency.

With n concurrent requests an instance takes `token_s + slowdown_s·n` seconds per token of each request, so that it
serves n / (tokens · (token_s + slowdown_s·n)) requests per second. Memory, max_num_seqs and the latency threshold of
the longest responses limit n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIOR_WEIGHT = 1.0  # in periods
PRIOR_SLOWDOWN = 0.3  # a priori a full instance takes this share longer per token than one with few requests
MIN_CONCURRENCY = 1.0
USUAL_SHARE, MIN_USUAL_PERIODS = 0.9, 3  # of the maximum concurrency


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCapacity:
    """The limits of an engine: concurrent requests, and tokens in its KV cache; 0 is unknown."""

    seats: int = 0
    kv_tokens: int = 0

    def max_requests(self, tokens_per_request: float) -> float:
        """Return the number of concurrent requests that fit if each holds this number of tokens."""
        seats = float(self.seats) if self.seats else math.inf
        return min(seats, self.kv_tokens / tokens_per_request) if self.kv_tokens and tokens_per_request else seats


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """The lengths of requests, and how fast an instance serves them; all 0 is unknown."""

    tokens: float = 0.0  # mean of responses
    tail_tokens: float = 0.0  # quantile of responses
    held_tokens: float = 0.0  # mean in the KV cache per request, over its lifetime
    token_s: float = 0.0
    slowdown_s: float = 0.0

    def slowed(self, factor: float) -> LoadModel:
        """Return a model whose tokens take this factor longer."""
        return replace(self, token_s=self.token_s * factor, slowdown_s=self.slowdown_s * factor)

    def max_concurrency(self, capacity: InstanceCapacity, *, threshold_s: float, share: float) -> float:
        """Return the number of concurrent requests that an instance serves within the threshold."""
        bounds = [capacity.max_requests(self.held_tokens) * share]
        if self.tail_tokens and self.slowdown_s > 0:
            bounds.append((threshold_s / self.tail_tokens - self.token_s) / self.slowdown_s)
        return max(MIN_CONCURRENCY, min(bounds))

    def requests_per_s(self, concurrency: float) -> float:
        """Return the throughput of an instance at a concurrency; 0 if nothing is known."""
        if self.tokens <= 0 or self.token_s + self.slowdown_s <= 0:
            return 0.0
        if math.isinf(concurrency):
            return math.inf if self.slowdown_s == 0 else 1.0 / (self.tokens * self.slowdown_s)
        return concurrency / (self.tokens * (self.token_s + self.slowdown_s * concurrency))


def load_model_of(
    prompts: Floats,
    outputs: Floats,
    quantile: float,
    periods: Sequence[tuple[float, float]],
    capacity: InstanceCapacity,
) -> LoadModel:
    """Fit a model to lengths, and to periods: each a (mean concurrency of an instance, mean seconds per token)."""
    if not len(outputs) or not periods:
        return LoadModel()
    outputs = np.maximum(outputs, 1.0)
    # Weighted by length: a longer response is in the KV cache for longer.
    held_tokens = float((outputs * (prompts + outputs / 2)).sum() / outputs.sum())
    token_s, slowdown_s = _fit(np.array(periods), capacity.max_requests(held_tokens))
    return LoadModel(
        tokens=float(outputs.mean()),
        tail_tokens=float(np.quantile(outputs, quantile)),
        held_tokens=held_tokens,
        token_s=token_s,
        slowdown_s=slowdown_s,
    )


def _fit(periods: Floats, full: float) -> tuple[float, float]:
    """Fit a line whose slope and intercept are at least 0; a prior point adds a slope at constant concurrency."""
    usual = periods[periods[:, 0] <= USUAL_SHARE * full]  # preemption and queueing distort the others
    periods = usual if len(usual) >= MIN_USUAL_PERIODS else periods
    excess = np.maximum(1.0, periods[:, 0] / full)  # waiting requests take longer without slowing down the others
    concurrency, token_s = periods[:, 0] / excess, periods[:, 1] / excess
    usual_s, middle = float(token_s.mean()), float(concurrency.mean())
    far = full if 2 * middle < full < math.inf else 2 * middle
    concurrency = np.append(concurrency, far)
    token_s = np.append(token_s, usual_s * (1 + PRIOR_SLOWDOWN * (far - middle) / far) if far > 0 else usual_s)
    weights = np.append(np.ones(len(periods)), PRIOR_WEIGHT)
    mean_n = float(np.average(concurrency, weights=weights))
    mean_s = float(np.average(token_s, weights=weights))
    variance = float(np.average((concurrency - mean_n) ** 2, weights=weights))
    if variance <= 0:
        return usual_s, 0.0
    slope_s = float(np.average((concurrency - mean_n) * (token_s - mean_s), weights=weights)) / variance
    slope_s = min(max(slope_s, 0.0), mean_s / mean_n if mean_n > 0 else 0.0)
    return max(0.0, mean_s - slope_s * mean_n), slope_s
