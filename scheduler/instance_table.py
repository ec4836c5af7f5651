"""What is known of all instances, kept up to date in place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from scheduler.candidates import ANY_REQUEST, SECONDS_PER_MINUTE, Candidates, Facts, InstanceColumns, Places
from scheduler.indicators import OTHERWISE, ROW_OF, Column

ON_ITS_WAY = [ROW_OF["num_reserved"], ROW_OF["num_reserved_blocks"], ROW_OF["queued_prefill_tokens"]]


class InstanceTable:
    """Follows instances as they come, tell of themselves, and go; all of it may be forgotten without harm.

    Whoever sees an engine's state at first hand, as a simulator does, may write
    `known.told[ROW_OF[name], place_of[instance_id]]` and `known.told_s` directly. The arrays are replaced when
    instances come or go.
    """

    def __init__(self, instance_ids: Iterable[str] = ()) -> None:
        """Know of some instances, and nothing about them."""
        self.place_of: dict[str, int] = {}
        self.known = _nothing_about((), 0)
        self._next_number = 0
        self._sent: deque[tuple[float, str]] = deque()
        self._on_its_way: dict[str, Column] = {}  # requests, blocks and tokens
        self.follow(instance_ids)

    def follow(self, instance_ids: Iterable[str]) -> None:
        """Take a new list of instances; what is known of those that stay is kept."""
        ids = tuple(sorted(set(instance_ids)))
        before, was_at = self.known, self.place_of
        if ids == before.instance_ids:
            return
        self.known = _nothing_about(ids, self._next_number)
        self._next_number += len(ids)
        self.place_of = {name: place for place, name in enumerate(ids)}
        stay = [name for name in ids if name in was_at]
        old, new = [was_at[name] for name in stay], [self.place_of[name] for name in stay]
        self.known.told[:, new] = before.told[:, old]
        for after, there in (
            (self.known.numbers, before.numbers),
            (self.known.told_s, before.told_s),
            (self.known.sent_lately, before.sent_lately),
        ):
            after[new] = there[old]
        self._sent = deque(entry for entry in self._sent if entry[1] in self.place_of)
        self._on_its_way = {name: way for name, way in self._on_its_way.items() if name in self.place_of}

    def tell(self, instance_id: str, values: Mapping[str, float], now_s: float, age_s: float = 0.0) -> None:
        """Take all that an instance's sidecar knows of it; names that no policy reads are passed over."""
        place = self.place_of[instance_id]
        self.known.told[:, place] = OTHERWISE
        self.update(instance_id, values, now_s, age_s)
        if instance_id in self._on_its_way:
            self.known.told[ON_ITS_WAY, place] += self._on_its_way[instance_id]

    def update(self, instance_id: str, values: Mapping[str, float], now_s: float, age_s: float = 0.0) -> None:
        """Take what has changed since an instance was last heard of."""
        place = self.place_of[instance_id]
        told = self.known.told[:, place]
        for name, value in values.items():
            row = ROW_OF.get(name)
            if row is not None:
                told[row] = value
        self.known.told_s[place] = now_s - age_s

    def sent(self, instance_id: str, now_s: float, *, prefill_tokens: float = 0.0, blocks: float = 0.0) -> None:
        """Count a request that was sent to an instance as reserved there, until the instance tells of itself anew."""
        place = self.place_of[instance_id]
        self.known.told[ON_ITS_WAY, place] += (1.0, blocks, prefill_tokens)
        self.known.sent_lately[place] += 1.0
        self._sent.append((now_s, instance_id))

    @contextmanager
    def on_its_way(
        self, instance_id: str, now_s: float, *, prefill_tokens: float = 0.0, blocks: float = 0.0
    ) -> Iterator[None]:
        """Count a request as reserved while it is on its way, whatever the instance tells meanwhile.

        After that it counts only if the instance says so.
        """
        self.sent(instance_id, now_s, prefill_tokens=prefill_tokens, blocks=blocks)
        share = np.array((1.0, blocks, prefill_tokens))
        number = self.known.numbers[self.place_of[instance_id]]
        way = self._on_its_way.setdefault(instance_id, np.zeros(3))
        way += share
        try:
            yield
        finally:
            place = self.place_of.get(instance_id)
            if place is not None and self.known.numbers[place] == number:
                way -= share
                self.known.told[ON_ITS_WAY, place] -= share

    def candidates(self, facts: Facts = ANY_REQUEST, now_s: float = 0.0, places: Places | None = None) -> Candidates:
        """Show all instances to a policy, or those at some places; what is told later may or may not show."""
        while self._sent and self._sent[0][0] <= now_s - SECONDS_PER_MINUTE:
            self.known.sent_lately[self.place_of[self._sent.popleft()[1]]] -= 1.0
        return Candidates(known=self.known, now_s=now_s, facts=facts, places=places)


def _nothing_about(ids: tuple[str, ...], first_number: int) -> InstanceColumns:
    return InstanceColumns(
        instance_ids=ids,
        numbers=np.arange(first_number, first_number + len(ids), dtype=np.intp),
        told=np.repeat(OTHERWISE[:, None], len(ids), axis=1),
        told_s=np.full(len(ids), -math.inf),
        sent_lately=np.zeros(len(ids)),
    )
