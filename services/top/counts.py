"""What the metrics of gateways and schedulers say of the time between two readings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
READ = (
    "block_gateway_requests",
    "block_gateway_requests_under_way",
    "block_gateway_ttft_seconds",
    "block_gateway_e2e_seconds",
    "block_gateway_slo_requests",
    "block_gateway_slo_attained",
    "block_decisions",
    "block_decision_seconds",
    "block_placements",
    "block_held_requests",
    "block_scheduler_shed",
    "block_scheduler_forecast_error_ratio",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSamples:
    """The samples of several processes at one moment; equal series of different processes are added."""

    at_s: float
    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, texts: Iterable[str], at_s: float) -> MetricSamples:
        """Read what /metrics of each process replies; ValueError where that is something else."""
        values: dict[str, dict[Labels, float]] = {}
        for text in texts:
            for family in _families(text):
                for sample in family.samples if family.name in READ else ():
                    if sample.name.endswith("_bucket") and "le" not in sample.labels:
                        raise ValueError(f"{sample.name}: has no label le")
                    of_name = values.setdefault(sample.name, {})
                    labels = frozenset(sample.labels.items())
                    of_name[labels] = of_name.get(labels, 0.0) + sample.value
        return cls(at_s=at_s, values=values)

    def total(self, name: str, **where: str) -> float | None:
        """Add the samples of a name with these labels; None where there are none."""
        found = [value for labels, value in self.values.get(name, {}).items() if where.items() <= dict(labels).items()]
        return sum(found) if found else None


def _families(text: str) -> Iterator[Metric]:
    try:
        yield from text_string_to_metric_families(text)
    except IndexError:  # of the parser, for a line that ends early
        raise ValueError("a line ends early") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Two readings, the second after the first."""

    before: MetricSamples
    after: MetricSamples

    def increase(self, name: str, **where: str) -> float | None:
        """By how much a counter grew; None where no process has it. A restarted process counts from 0 again."""
        after = self.after.total(name, **where)
        if after is None:
            return None
        before = self.before.total(name, **where) or 0.0
        return after - before if after >= before else after

    def rate(self, name: str, **where: str) -> float | None:
        """Its increase per second."""
        grown, passed_s = self.increase(name, **where), self.after.at_s - self.before.at_s
        return None if grown is None or passed_s <= 0 else grown / passed_s

    def mean(self, name: str, **where: str) -> float | None:
        """The mean of a histogram's or summary's observations in between; of all, if there was none."""
        total, number = self.increase(f"{name}_sum", **where), self.increase(f"{name}_count", **where)
        if not number:
            total, number = self.after.total(f"{name}_sum", **where), self.after.total(f"{name}_count", **where)
        return total / number if total is not None and number else None

    def quantile(self, q: float, name: str) -> float | None:
        """Estimate a quantile of a histogram's observations in between, or of all if there was none."""
        for before in (self.before, None):
            buckets = self._buckets(f"{name}_bucket", before)
            if buckets and buckets[-1][1] > 0:
                return quantile_of(buckets, q)
        return None

    def _buckets(self, name: str, before: MetricSamples | None) -> list[tuple[float, float]]:
        counts: dict[float, float] = {}
        for sign, samples in ((1, self.after), (-1, before)):
            for labels, value in (samples.values.get(name, {}) if samples is not None else {}).items():
                bound = float(dict(labels)["le"])
                counts[bound] = counts.get(bound, 0.0) + sign * value
        return sorted(counts.items())


def quantile_of(buckets: list[tuple[float, float]], q: float) -> float:
    """Interpolate in the bucket of the quantile, as PromQL does; beyond the last bound, return that bound."""
    rank = q * buckets[-1][1]
    low = below = 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return low
            return bound if count == below else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
