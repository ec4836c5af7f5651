"""The metrics of a subscriber to KV events."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry

from predictor.kv_events.events import GPU
from predictor.kv_events.index import MAX_MEDIA
from predictor.kv_events.stream import COMPLETE, PARTIAL, UNSURE, KvEventStream
from services.bounded_label import BoundedLabel
from services.metrics_by_instance import MetricsByInstance


class KvEventCollectors:
    """The metrics of all KV events that one process follows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register the metrics."""
        register = MetricsByInstance(registry)
        self.batches = register.counter(
            "block_kv_event_batches",
            "Batches of KV events by result: applied, duplicate, invalid, other_topic or other_rank.",
            "result",
        )
        self.repairs = register.counter(
            "block_kv_event_repairs",
            "Gaps in the sequence of KV events and what followed: gap, replayed (batches), lost or restart.",
            "kind",
        )
        self.unknown = register.counter("block_kv_events_unknown", "KV events of a kind that is not known.")
        self.state = register.gauge(
            "block_kv_events_state",
            "1 for how well the prefix cache is known from KV events: complete, partial or unsure.",
            "state",
        )
        self.blocks = register.gauge(
            "block_kv_cached_blocks", "KV blocks that hit a prefix, by the medium that they are on.", "medium"
        )
        self.lag_s = register.gauge(
            "block_kv_events_lag_seconds", "Time from the publication of the last KV event to its arrival."
        )


class KvEventMetrics:
    """The metrics of one instance's KV events."""

    def __init__(self, collectors: KvEventCollectors, instance_id: str, stream: KvEventStream) -> None:
        """Label the metrics with the instance."""
        self._all, self._instance, self._stream = collectors, instance_id, stream
        self._seen: dict[str, int] = {}
        self._media: set[str] = set()  # that had blocks
        self._medium_of = BoundedLabel(MAX_MEDIA)
        self.update()

    def count(self, result: str) -> None:
        """Count a batch that was not applied."""
        self._all.batches.labels(self._instance, result).inc()

    def count_unknown(self, num_events: int) -> None:
        """Count events of unknown kinds."""
        self._all.unknown.labels(self._instance).inc(num_events)

    def set_lag(self, seconds: float) -> None:
        """Set how late the last batch came."""
        self._all.lag_s.labels(self._instance).set(max(0.0, seconds))

    def update(self) -> None:
        """Take the stream's counts and state."""
        counts = self._stream.counts
        for result, total in (("applied", counts.applied), ("duplicate", counts.duplicates)):
            self._all.batches.labels(self._instance, result).inc(self._new(result, total))
        repairs = {"gap": counts.gaps, "replayed": counts.replayed, "lost": counts.lost, "restart": counts.restarts}
        for kind, total in repairs.items():
            self._all.repairs.labels(self._instance, kind).inc(self._new(kind, total))
        for state in (COMPLETE, PARTIAL, UNSURE):
            self._all.state.labels(self._instance, state).set(state == self._stream.certainty)
        index = self._stream.index
        num_blocks = Counter({GPU: index.num_blocks})
        for medium, num in index.num_offloaded().items():
            num_blocks[self._medium_of(medium)] += num
        self._media |= num_blocks.keys()
        for medium in self._media:
            self._all.blocks.labels(self._instance, medium).set(num_blocks[medium])

    def _new(self, name: str, total: int) -> int:
        before, self._seen[name] = self._seen.get(name, 0), total
        return total - before
