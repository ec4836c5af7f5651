"""Corrects which requests of a mirrored engine run, wait and hold blocks, where its metrics differ from the model."""

from __future__ import annotations

from collections.abc import Mapping

from predictor.mirror.events import UnknownRequestsChanged
from predictor.mirror.models import EngineModels
from predictor.mirror.scraped_metrics import ScrapedMetrics

SILENT_S = 1.0  # after which a request whose tokens are overdue is assumed to wait
SURPLUS_SCRAPES = 8  # in a row that count fewer requests than are known: the most silent ones have left the engine


class RequestCorrection:
    """What scrapes in a row say of the requests of an engine."""

    def __init__(self, speed: float) -> None:
        """Start without a scrape; the engine's clock runs `speed` times as fast as the wall clock."""
        self.num_unknown = 0  # requests that bypass the proxy
        self._silent_s = SILENT_S * speed
        self._num_surplus_scrapes = 0

    def correct(
        self, models: EngineModels, metrics: ScrapedMetrics, arrived_s: Mapping[str, float], now_s: float
    ) -> UnknownRequestsChanged | None:
        """Correct the model by the metrics; `arrived_s` are the arrivals of the requests in flight.

        Return the change of the number of unknown requests, if there is one.
        """
        tracker = models.tracker
        tracker.set_waiting(tracker.silent_since_first_token(now_s, self._silent_s))
        if metrics.running is not None and metrics.waiting is not None:
            num_requests = round(metrics.running + metrics.waiting)
            models.unknown.update(round(metrics.running), round(metrics.waiting), metrics.kv_usage, now_s)
            # a request that arrived just now may not be in the metrics yet
            num_settled = sum(since_s < now_s - self._silent_s for since_s in arrived_s.values())
            surplus = num_settled - num_requests
            self._num_surplus_scrapes = self._num_surplus_scrapes + 1 if surplus > 0 else 0
            if self._num_surplus_scrapes >= SURPLUS_SCRAPES:
                self._remove_silent(models, arrived_s, surplus, now_s)
        if metrics.kv_usage is not None:
            tracker.set_used_blocks(round(metrics.kv_usage * tracker.engine.num_blocks))
        before, self.num_unknown = self.num_unknown, len(models.unknown)
        return None if before == self.num_unknown else UnknownRequestsChanged(before=before, now=self.num_unknown)

    def _remove_silent(
        self, models: EngineModels, arrived_s: Mapping[str, float], max_removed: int, now_s: float
    ) -> None:
        """Remove requests that the engine does not have any more: those without an event for the longest time."""
        tracker = models.tracker
        names = [name for name in tracker.requests if name in arrived_s]
        names.sort(key=lambda name: tracker.requests[name].last_event_s)
        for name in names[:max_removed]:
            if now_s - tracker.requests[name].last_event_s < self._silent_s:
                break
            tracker.remove(name, now_s)
            if models.blocks is not None:
                models.blocks.end(name, 0)
