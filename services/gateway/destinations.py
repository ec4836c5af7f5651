"""Where a request may go: by a decision, or without one; and which instances failed recently."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from protos.block.v1 import common_pb2
from scheduler.circuit import CircuitState
from scheduler.instances import PREFILL_ROLE
from services.http.data_parallel import rank_of
from services.http.origin import Origin, origin_of

LAST_RESORT = "last_resort_round_robin"
NEXT_BEST = "next_best"
MAX_CIRCUITS = 4096
NAMED_S = 600.0  # how long an instance that no decision names is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """One instance, and the decision or rule that chose it."""

    instance_id: str
    origin: Origin
    policy: str
    decision: common_pb2.Decision | None = None  # that reserved there, if any
    prefill: Destination | None = None  # the instance of the prefill leg, where the request is disaggregated
    rank: int | None = None  # the data-parallel rank, of an engine that serves several at its URL


def destination_of(decision: common_pb2.Decision) -> Destination:
    """Convert a decision; ValueError where it names no instance that can be reached."""
    prefill = None
    if decision.HasField("prefill"):
        prefill = _destination(decision.prefill.instance, decision)
    return _destination(decision.instance, decision, prefill)


def _destination(
    instance: common_pb2.Instance, decision: common_pb2.Decision, prefill: Destination | None = None
) -> Destination:
    return Destination(
        instance_id=instance.instance_id,
        origin=origin_of(instance.engine_url),
        policy=decision.policy,
        decision=decision,
        prefill=prefill,
        rank=rank_of(instance),
    )


def unreserved_destinations(instances: Iterable[common_pb2.Instance], policy: str) -> Iterator[Destination]:
    """Yield instances that serve whole requests as destinations without a reservation; invalid URLs are left out."""
    for instance in instances:
        if instance.role == PREFILL_ROLE:
            continue
        with suppress(ValueError):
            yield Destination(
                instance_id=instance.instance_id,
                origin=origin_of(instance.engine_url),
                policy=policy,
                rank=rank_of(instance),
            )


class Fallback:
    """Chooses in turn while no scheduler decides: engines of the settings, and instances that decisions named.

    Instances that failed recently come last. An instance that no decision has named for long is dropped.
    """

    def __init__(self, urls: Sequence[str], clock: Callable[[], float]) -> None:
        """Start with the URLs of engines."""
        self._urls = [url.rstrip("/") for url in urls]
        self._clock = clock
        self._named: dict[tuple[str, int | None], tuple[common_pb2.Instance, float]] = {}  # by URL and rank
        self._latest_s = 0.0
        self._turn = -1

    def __bool__(self) -> bool:
        """Return whether there is any destination."""
        return bool(self._named or self._urls)

    @property
    def urls(self) -> list[str]:
        """The engines whose instances no decision has named."""
        named = {url for url, _ in self._named}
        return [url for url in self._urls if url not in named]

    def note(self, decision: common_pb2.Decision) -> None:
        """Keep the instances that a decision names."""
        self._latest_s = now_s = self._clock()
        instances = [decision.instance, *decision.next_best]
        if decision.HasField("prefill"):
            instances.append(decision.prefill.instance)
        for instance in instances:
            self._named[instance.engine_url.rstrip("/"), rank_of(instance)] = (instance, now_s)

    def named(self) -> list[common_pb2.Instance]:
        """Return the instances that decisions named recently, as of the last decision."""
        since_s = self._latest_s - NAMED_S
        self._named = {place: named for place, named in self._named.items() if named[1] >= since_s}
        return [instance for instance, _ in self._named.values()]

    def ranks_beside(self, destination: Destination) -> list[str]:
        """Return the other data-parallel ranks of an engine, which cannot be reached either where it cannot."""
        if destination.rank is None:
            return []
        return [
            one.instance_id
            for one in self.named()
            if one.instance_id != destination.instance_id and origin_of(one.engine_url) == destination.origin
        ]

    def next(self, model: str, excluded: Collection[str], avoided: Collection[str]) -> Destination | None:
        """Return the next one: preferably one that has not failed recently, never an excluded one."""
        destinations = self._destinations(model)
        self._turn += 1
        num = len(destinations)
        in_turn = [destinations[(self._turn + step) % num] for step in range(num)]
        left = [one for one in in_turn if one.instance_id not in excluded]
        return next((one for one in left if one.instance_id not in avoided), left[0] if left else None)

    def _destinations(self, model: str) -> list[Destination]:
        """Return those that may serve a model or an adapter; instances that name no models may serve any."""
        named = [one for one in self.named() if not (model and one.models) or model in (*one.models, *one.adapters)]
        return [*unreserved_destinations(named, LAST_RESORT), *map(_engine_at, self.urls)]


def _engine_at(url: str) -> Destination:
    origin = origin_of(url)
    return Destination(instance_id=f"{origin.host}:{origin.port}{origin.prefix}", origin=origin, policy=LAST_RESORT)


class OutlierDetection:
    """Avoids instances that could not be reached: a dead one looks idle, and would attract all requests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without failures."""
        self._clock = clock
        self._circuits: dict[str, CircuitState] = {}

    def avoided(self) -> list[str]:
        """Return the instances to avoid now; after its pause an instance may be chosen again."""
        if not self._circuits:
            return []
        now_s = self._clock()
        return [instance_id for instance_id, circuit in self._circuits.items() if not circuit.may_try(now_s)]

    def failed(self, instance_id: str) -> None:
        """Count a failure; requests that fail while the circuit is open were sent before, and do not count."""
        now_s = self._clock()
        if len(self._circuits) >= MAX_CIRCUITS and instance_id not in self._circuits:
            del self._circuits[next(iter(self._circuits))]
        circuit = self._circuits.setdefault(instance_id, CircuitState())
        if circuit.allows(now_s):
            circuit.failed(now_s)

    def succeeded(self, instance_id: str) -> None:
        """Forget the failures."""
        if self._circuits:
            self._circuits.pop(instance_id, None)
