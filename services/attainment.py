"""Counts of what requests with targets attained, by class and priority, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric

from predictor.gain import ResponseAttainment
from services.bounded_label import BoundedLabel

MAX_PRIORITIES = 16  # that have a label of their own; clients choose priorities, and labels must stay few
MAX_CLIENTS = 100
MAX_TPOT_TARGETS = 20
MAX_WEIGHT = 1e6  # clients choose weights, and one request must not outweigh all others for ever
TARGETS = ("ttft", "tpot", "slo", "deadlines")


@dataclass(slots=True, kw_only=True)
class AttainmentCounts:
    """Counts of the requests of one class and priority."""

    tokens_due: int = 0
    tokens_on_time: int = 0
    possible_gain: float = 0.0
    gain: float = 0.0
    num_with: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TARGETS, 0))
    num_attained: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TARGETS, 0))


class AttainmentTally:
    """Sums up what requests attained."""

    def __init__(self) -> None:
        """Start empty."""
        self._groups: dict[tuple[str, str], AttainmentCounts] = {}
        self._priority_of = BoundedLabel(MAX_PRIORITIES)

    def add(self, attained: ResponseAttainment, *, request_class: str, priority: int, weight: float) -> None:
        """Count a request."""
        weight = min(weight, MAX_WEIGHT)
        group = request_class, self._priority_of(str(priority))
        counts = self._groups.setdefault(group, AttainmentCounts())
        counts.tokens_due += attained.tokens_due
        counts.tokens_on_time += attained.tokens_on_time
        counts.possible_gain += weight * attained.tokens_due
        counts.gain += weight * attained.tokens_on_time
        for target in TARGETS:
            value = getattr(attained, target)
            if value is not None:
                counts.num_with[target] += 1
                counts.num_attained[target] += value

    def groups(self) -> Iterator[tuple[tuple[str, str], AttainmentCounts]]:
        """Yield class and priority with their counts."""
        yield from self._groups.items()


class ClientTally:
    """Counts requests with targets, and those that attained all of them, by client and TPOT target."""

    def __init__(self) -> None:
        """Start empty."""
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._client_of = BoundedLabel(MAX_CLIENTS)
        self._tpot_of = BoundedLabel(MAX_TPOT_TARGETS)

    def add(self, attained: ResponseAttainment, *, client_id: str, tpot_s: float | None) -> None:
        """Count a request."""
        if attained.slo is None:
            return
        group = self._client_of(client_id), "" if tpot_s is None else self._tpot_of(f"{tpot_s:g}")
        counts = self._counts.setdefault(group, [0, 0])
        counts[0] += 1
        counts[1] += attained.slo

    def fill(self, requests: CounterMetricFamily, attained: CounterMetricFamily) -> None:
        """Write the counts into metrics."""
        for group, (num, num_attained) in self._counts.items():
            requests.add_metric(group, num)
            attained.add_metric(group, num_attained)


def filled(tally: AttainmentTally, families: tuple[CounterMetricFamily, ...]) -> tuple[Metric, ...]:
    """Write a tally into the metrics of a server: those of tokens due and on time, of gain, and of targets."""
    tokens_due, tokens_on_time, possible_gain, gain, targets, attained = families
    for group, counts in tally.groups():
        tokens_due.add_metric(group, counts.tokens_due)
        tokens_on_time.add_metric(group, counts.tokens_on_time)
        possible_gain.add_metric(group, counts.possible_gain)
        gain.add_metric(group, counts.gain)
        for target in TARGETS:
            targets.add_metric((target, *group), counts.num_with[target])
            attained.add_metric((target, *group), counts.num_attained[target])
    return families
