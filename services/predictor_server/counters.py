"""Indicators that count: what an engine's own counters tell, and what has happened within the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

MINUTE_S = 60.0


class Counters:
    """One engine's, from its start or since it was found."""

    def __init__(self) -> None:
        """Know of nothing yet."""
        self._arrivals: deque[float] = deque(maxlen=1 << 16)
        self._looked_up: deque[tuple[float, int, int]] = deque(maxlen=1 << 12)  # when, tokens looked up, of them found
        self._state: Mapping[str, float] | np.void | None = None

    def arrived(self, num_requests: int, now_s: float) -> None:
        """Note requests that came just now."""
        self._arrivals.extend([now_s] * num_requests)

    def take(self, state: Mapping[str, float] | np.void, now_s: float) -> None:
        """Note what the engine's counters show (`services.engine_state.layout.STATE`)."""
        self._state = state
        queries, hits = int(state["prefix_queries"]), int(state["prefix_hits"])
        if not self._looked_up or self._looked_up[-1][1] != queries:
            self._looked_up.append((now_s, queries, hits))
        while len(self._looked_up) > 1 and self._looked_up[1][0] < now_s - MINUTE_S:
            self._looked_up.popleft()
        while self._arrivals and self._arrivals[0] < now_s - MINUTE_S:
            self._arrivals.popleft()

    def values(self, clock_rate: float) -> dict[str, float]:
        """The indicators by name."""
        values = {"requests_per_minute": float(len(self._arrivals))}
        if self._state is not None:
            values["num_preemptions_total"] = float(self._state["num_preemptions"])
            values["num_finished_total"] = float(self._state["num_outcomes"])
            if self._state["last_step_s"] > 0:
                values["step_s"] = float(self._state["last_step_s"]) / clock_rate
        if (ratio := self._hit_ratio()) is not None:
            values["kv_hit_ratio"] = ratio
        return values

    def _hit_ratio(self) -> float | None:
        """The share of prompt tokens that the prefix cache held, of those looked up lately."""
        if not self._looked_up:
            return None
        (_, queries, hits), (_, queries_now, hits_now) = self._looked_up[0], self._looked_up[-1]
        if queries_now <= queries:
            return None
        return min(1.0, max(0.0, (hits_now - hits) / (queries_now - queries)))
