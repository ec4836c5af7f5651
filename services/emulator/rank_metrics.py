"""Metrics of an engine with several data-parallel ranks: vLLM labels those of each rank with its number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from services.emulator.metrics import Exposition


class RankExposition(Collector):
    """Writes the metrics of all ranks."""

    def __init__(self, ranks: Sequence[Exposition]) -> None:
        """Combine the ranks' own metrics."""
        self._ranks = list(ranks)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        """Return the present values in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Describe nothing, as nothing is known before the engine runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of all ranks; samples with equal labels are added up."""
        families: dict[str, Metric] = {}
        for rank in self._ranks:
            for family in rank.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples = _added(known.samples, family.samples)
        yield from families.values()


def _added(samples: Sequence[Sample], more: Sequence[Sample]) -> list[Sample]:
    """Add samples to those that are there; where the name and the labels are equal, their values."""
    places = {(one.name, *sorted(one.labels.items())): place for place, one in enumerate(samples)}
    added = list(samples)
    for one in more:
        place = places.get((one.name, *sorted(one.labels.items())))
        if place is None:
            added.append(one)
        elif not one.name.endswith("_created"):
            added[place] = added[place]._replace(value=added[place].value + one.value)
    return added
