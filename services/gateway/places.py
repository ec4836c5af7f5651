"""Where a request may go: what a scheduler says, else what is left; and which instances have just failed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from protos.block.v1 import common_pb2
from scheduler.circuit import Circuit
from services.http_client import Origin, origin_of

LAST_RESORT = "last_resort_round_robin"
NEXT_BEST = "next_best"
MOST_CIRCUITS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One instance, and on whose word."""

    instance_id: str
    origin: Origin
    policy: str
    decision: common_pb2.Decision | None = None  # that reserved there, if one did


def place_of(decision: common_pb2.Decision) -> Place:
    """Read a decision; one that names no place is refused."""
    instance = decision.instance
    return Place(
        instance_id=instance.instance_id,
        origin=origin_of(instance.engine_url),
        policy=decision.policy,
        decision=decision,
    )


def place_next_best(instance: common_pb2.Instance) -> Place:
    """Go where an earlier decision would have gone next; nothing is reserved there."""
    return Place(instance_id=instance.instance_id, origin=origin_of(instance.engine_url), policy=NEXT_BEST)


class LastResort:
    """Engines from the settings, one after the other, those that fail left alone for a while."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Know their URLs."""
        self.urls = list(urls)
        self.places = [
            Place(instance_id=f"{origin.host}:{origin.port}{origin.prefix}", origin=origin, policy=LAST_RESORT)
            for origin in map(origin_of, urls)
        ]
        self._turn = -1

    def next(self, excluded: Collection[str], avoided: Collection[str]) -> Place | None:
        """Give the next one: rather one that has not failed lately, never one that is excluded."""
        self._turn += 1
        count = len(self.places)
        in_turn = [self.places[(self._turn + step) % count] for step in range(count)]
        left = [place for place in in_turn if place.instance_id not in excluded]
        return next((place for place in left if place.instance_id not in avoided), left[0] if left else None)


class FailedLately:
    """Instances that could not be reached: a dead one looks idle, and would draw everything to itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Know nobody yet."""
        self._clock = clock
        self._circuits: dict[str, Circuit] = {}

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
        circuit = self._circuits.setdefault(instance_id, Circuit())
        if circuit.allows(now_s):
            circuit.failed(now_s)

    def succeeded(self, instance_id: str) -> None:
        """Forget the failures."""
        if self._circuits:
            self._circuits.pop(instance_id, None)
