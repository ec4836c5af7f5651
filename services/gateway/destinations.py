"""Where a request may go: what a scheduler says, else what is left; and which instances have just failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from protos.block.v1 import common_pb2
from scheduler.circuit import CircuitState
from services.http.client import Origin, origin_of

LAST_RESORT = "last_resort_round_robin"
NEXT_BEST = "next_best"
MOST_CIRCUITS = 4096
NAMED_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """One instance, and on whose word."""

    instance_id: str
    origin: Origin
    policy: str
    decision: common_pb2.Decision | None = None  # that reserved there, if one did


def destination_of(decision: common_pb2.Decision) -> Destination:
    """Read a decision; one that names no place is refused."""
    instance = decision.instance
    return Destination(
        instance_id=instance.instance_id,
        origin=origin_of(instance.engine_url),
        policy=decision.policy,
        decision=decision,
    )


def unreserved_destinations(instances: Iterable[common_pb2.Instance], policy: str) -> Iterator[Destination]:
    """Give instances as places where nothing is reserved, as far as they say where they are."""
    for instance in instances:
        with suppress(ValueError):
            yield Destination(instance_id=instance.instance_id, origin=origin_of(instance.engine_url), policy=policy)


class Fallback:
    """Where to go while no scheduler decides: engines from the settings, and instances that decisions named; in turn.

    Those that fail are left alone for a while. An instance that decisions have not named for long may be gone.
    """

    def __init__(self, urls: Sequence[str], clock: Callable[[], float]) -> None:
        """Know the URLs of engines."""
        self._urls = [url.rstrip("/") for url in urls]
        self._clock = clock
        self._named: dict[str, tuple[common_pb2.Instance, float]] = {}
        self._latest_s = 0.0
        self._turn = -1

    def __bool__(self) -> bool:
        """Tell whether there is any place at all."""
        return bool(self._named or self._urls)

    @property
    def urls(self) -> list[str]:
        """Where engines are, as far as nobody has named their instances."""
        return [url for url in self._urls if url not in self._named]

    def saw(self, decision: common_pb2.Decision) -> None:
        """Remember the instances that a decision names."""
        self._latest_s = now_s = self._clock()
        for instance in (decision.instance, *decision.next_best):
            self._named[instance.engine_url.rstrip("/")] = (instance, now_s)

    def named(self) -> list[common_pb2.Instance]:
        """Give the instances that decisions have named lately: before the last one, whenever that was."""
        since_s = self._latest_s - NAMED_S
        self._named = {url: named for url, named in self._named.items() if named[1] >= since_s}
        return [instance for instance, _ in self._named.values()]

    def next(self, model: str, excluded: Collection[str], avoided: Collection[str]) -> Destination | None:
        """Give the next one: rather one that has not failed lately, never one that is excluded."""
        places = self._places(model)
        self._turn += 1
        in_turn = [places[(self._turn + step) % len(places)] for step in range(len(places))]
        left = [place for place in in_turn if place.instance_id not in excluded]
        return next((place for place in left if place.instance_id not in avoided), left[0] if left else None)

    def _places(self, model: str) -> list[Destination]:
        """Give those that may serve a model, as far as they have said which they serve."""
        named = [instance for instance in self.named() if not (model and instance.models) or model in instance.models]
        return [*unreserved_destinations(named, LAST_RESORT), *map(_engine_at, self.urls)]


def _engine_at(url: str) -> Destination:
    origin = origin_of(url)
    return Destination(instance_id=f"{origin.host}:{origin.port}{origin.prefix}", origin=origin, policy=LAST_RESORT)


class OutlierDetection:
    """Instances that could not be reached: a dead one looks idle, and would draw everything to itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Know nobody yet."""
        self._clock = clock
        self._circuits: dict[str, CircuitState] = {}

    def avoided(self) -> list[str]:
        """Name those to leave alone now. When its pause is over an instance may be chosen again, and not before."""
        if not self._circuits:
            return []
        now_s = self._clock()
        return [instance_id for instance_id, circuit in self._circuits.items() if not circuit.may_try(now_s)]

    def failed(self, instance_id: str) -> None:
        """Note a failure; all that fails while an instance is left alone began before, and is no news."""
        now_s = self._clock()
        if len(self._circuits) >= MOST_CIRCUITS and instance_id not in self._circuits:
            del self._circuits[next(iter(self._circuits))]
        circuit = self._circuits.setdefault(instance_id, CircuitState())
        if circuit.allows(now_s):
            circuit.failed(now_s)

    def succeeded(self, instance_id: str) -> None:
        """Forget the failures."""
        if self._circuits:
            self._circuits.pop(instance_id, None)
