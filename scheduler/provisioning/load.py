"""What one instance bears, told from the requests that were placed: tokens, their pace, and how it falls with company.

With n requests at a time an instance takes `pace_s + drag_s·n` seconds a token of each, so that it serves
n / (tokens · (pace_s + drag_s·n)) requests a second; n ends where memory, seats or the longest answers' patience do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WEIGHT_OF_GUESS = 1.0  # spans that the guess below counts for
GUESS = 0.3  # as long as nothing else was seen: a full instance takes this share longer for a token than one with few
LEAST_COMPANY = 1.0
USUAL, ENOUGH = 0.9, 3  # of an instance's room; spans


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCapacity:
    """What an instance has of what requests take; 0 is not known."""

    seats: int = 0
    kv_tokens: int = 0

    def company(self, held_tokens: float) -> float:
        """Tell how many requests at a time it has room for, if each holds so much memory."""
        seats = float(self.seats) if self.seats else math.inf
        return min(seats, self.kv_tokens / held_tokens) if self.kv_tokens and held_tokens else seats


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What requests are like, and what they do to an instance; all 0 is not known."""

    tokens: float = 0.0  # of an answer, on average
    tail_tokens: float = 0.0  # of the longest that still count
    held_tokens: float = 0.0  # of memory, that a request holds on average while it is there
    pace_s: float = 0.0
    drag_s: float = 0.0

    def slowed(self, by: float) -> Load:
        """Take that much longer for a token."""
        return replace(self, pace_s=self.pace_s * by, drag_s=self.drag_s * by)

    def company(self, room: InstanceCapacity, *, threshold_s: float, share: float) -> float:
        """Tell how many requests at a time an instance bears."""
        bounds = [room.company(self.held_tokens) * share]
        if self.tail_tokens and self.drag_s > 0:
            bounds.append((threshold_s / self.tail_tokens - self.pace_s) / self.drag_s)
        return max(LEAST_COMPANY, min(bounds))

    def rate(self, company: float) -> float:
        """Tell how many requests a second an instance serves with so many at a time; 0 where nothing is known."""
        if self.tokens <= 0 or self.pace_s + self.drag_s <= 0:
            return 0.0
        if math.isinf(company):
            return math.inf if self.drag_s == 0 else 1.0 / (self.tokens * self.drag_s)
        return company / (self.tokens * (self.pace_s + self.drag_s * company))


def load_of(
    prompts: Floats, outputs: Floats, quantile: float, spans: Sequence[tuple[float, float]], room: InstanceCapacity
) -> Load:
    """Learn from lengths, and from spans of time: (requests at a time on an instance, seconds a token) each."""
    if not len(outputs) or not spans:
        return Load()
    whole = np.maximum(outputs, 1.0)
    held_tokens = float((whole * (prompts + whole / 2)).sum() / whole.sum())  # the longer it stays, the more often
    pace_s, drag_s = _fit(np.array(spans), room.company(held_tokens))
    return Load(
        tokens=float(whole.mean()),
        tail_tokens=float(np.quantile(whole, quantile)),
        held_tokens=held_tokens,
        pace_s=pace_s,
        drag_s=drag_s,
    )


def _fit(spans: Floats, full: float) -> tuple[float, float]:
    """Fit a line that neither falls nor begins below nothing; a guess keeps it sane where company never changed."""
    within = spans[spans[:, 0] <= USUAL * full]  # what preempts and queues says little of what does not
    spans = within if len(within) >= ENOUGH else spans
    beyond = np.maximum(1.0, spans[:, 0] / full)  # who waits takes longer, and nothing is done faster
    company, took_s = spans[:, 0] / beyond, spans[:, 1] / beyond
    usual_s, middle = float(took_s.mean()), float(company.mean())
    far = full if 2 * middle < full < math.inf else 2 * middle
    company = np.append(company, far)
    took_s = np.append(took_s, usual_s * (1 + GUESS * (far - middle) / far) if far > 0 else usual_s)
    weights = np.append(np.ones(len(spans)), WEIGHT_OF_GUESS)
    mean_n = float(np.average(company, weights=weights))
    mean_s = float(np.average(took_s, weights=weights))
    spread = float(np.average((company - mean_n) ** 2, weights=weights))
    if spread <= 0:
        return usual_s, 0.0
    drag_s = float(np.average((company - mean_n) * (took_s - mean_s), weights=weights)) / spread
    drag_s = min(max(drag_s, 0.0), mean_s / mean_n if mean_n > 0 else 0.0)
    return max(0.0, mean_s - drag_s * mean_n), drag_s
