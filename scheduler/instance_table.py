"""The last known indicators of all instances, as arrays that are updated in place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from scheduler.adapters import ReportedAdapters
from scheduler.candidates import (
    ANY_REQUEST,
    SECONDS_PER_MINUTE,
    Candidates,
    InstanceColumns,
    RequestIndicators,
    Rows,
)
from scheduler.columns import Column
from scheduler.indicators import INDEX_OF, OTHERWISE

# What a request that is in flight adds to: requests, blocks, tokens.
IN_FLIGHT = [INDEX_OF["num_reserved"], INDEX_OF["num_reserved_blocks"], INDEX_OF["queued_prefill_tokens"]]


class InstanceTable:
    """Holds what instances reported last, in one row each; all of it may be lost without harm.

    A caller that sees engines directly, as a simulator does, may write `known.reported[INDEX_OF[name],
    row_of[instance_id]]` and `known.reported_s` itself. The arrays are replaced when instances come or go.
    """

    def __init__(self, instance_ids: Iterable[str] = ()) -> None:
        """Start with instances of which nothing is known."""
        self.row_of: dict[str, int] = {}
        self.known = _unknown((), 0)
        self._next_number = 0
        self._sent: deque[tuple[float, str]] = deque()
        self._in_flight: dict[str, Column] = {}  # requests, blocks and tokens
        self.follow(instance_ids)

    def follow(self, instance_ids: Iterable[str]) -> None:
        """Take a new list of instances; what is known of those that stay is kept."""
        ids = tuple(sorted(set(instance_ids)))
        before, row_before = self.known, self.row_of
        if ids == before.instance_ids:
            return
        self.known = _unknown(ids, self._next_number)
        self.known.adapters = before.adapters
        self.known.adapters.keep(ids)
        self._next_number += len(ids)
        self.row_of = {name: row for row, name in enumerate(ids)}
        stay = [name for name in ids if name in row_before]
        old, new = [row_before[name] for name in stay], [self.row_of[name] for name in stay]
        self.known.reported[:, new] = before.reported[:, old]
        for after, previous in (
            (self.known.numbers, before.numbers),
            (self.known.reported_s, before.reported_s),
            (self.known.sent_last_minute, before.sent_last_minute),
            (self.known.tier_tpot_s, before.tier_tpot_s),
            (self.known.tier_closed, before.tier_closed),
        ):
            after[new] = previous[old]
        self._sent = deque(entry for entry in self._sent if entry[1] in self.row_of)
        self._in_flight = {name: share for name, share in self._in_flight.items() if name in self.row_of}

    def set_tier(self, instance_id: str, tpot_slo_s: float, *, closed: bool) -> None:
        """Set the bound of the tier that an instance belongs to, infinite without one."""
        row = self.row_of[instance_id]
        self.known.tier_tpot_s[row], self.known.tier_closed[row] = tpot_slo_s, closed

    def replace(self, instance_id: str, values: Mapping[str, float], now_s: float, age_s: float = 0.0) -> None:
        """Replace all that is known of an instance; names that are no indicators are ignored."""
        row = self.row_of[instance_id]
        self.known.reported[:, row] = OTHERWISE
        self.update(instance_id, values, now_s, age_s)
        if instance_id in self._in_flight:
            self.known.reported[IN_FLIGHT, row] += self._in_flight[instance_id]

    def set_adapters(self, instance_id: str, adapters: ReportedAdapters) -> None:
        """Replace the LoRA adapters that an instance has."""
        self.known.adapters.replace(instance_id, adapters)

    def update(self, instance_id: str, values: Mapping[str, float], now_s: float, age_s: float = 0.0) -> None:
        """Take the indicators that changed since an instance's last report."""
        row = self.row_of[instance_id]
        reported = self.known.reported[:, row]
        for name, value in values.items():
            index = INDEX_OF.get(name)
            if index is not None:
                reported[index] = value
        self.known.reported_s[row] = now_s - age_s

    def sent(self, instance_id: str, now_s: float, *, prefill_tokens: float = 0.0, blocks: float = 0.0) -> None:
        """Count a request that was sent to an instance as reserved there, until the instance's next report."""
        row, reported = self.row_of[instance_id], self.known.reported
        for index, share in zip(IN_FLIGHT, (1.0, blocks, prefill_tokens), strict=True):
            if share:
                reported[index, row] += share
        self.known.sent_last_minute[row] += 1.0
        self._sent.append((now_s, instance_id))

    @contextmanager
    def in_flight(
        self, instance_id: str, now_s: float, *, prefill_tokens: float = 0.0, blocks: float = 0.0
    ) -> Iterator[None]:
        """Count a request as reserved while its reservation is in flight, whatever the instance reports meanwhile.

        Afterwards it counts only if the instance reports it.
        """
        self.sent(instance_id, now_s, prefill_tokens=prefill_tokens, blocks=blocks)
        share = np.array((1.0, blocks, prefill_tokens))
        number = self.known.numbers[self.row_of[instance_id]]
        in_flight = self._in_flight.setdefault(instance_id, np.zeros(3))
        in_flight += share
        try:
            yield
        finally:
            row = self.row_of.get(instance_id)
            if row is not None and self.known.numbers[row] == number:
                in_flight -= share
                self.known.reported[IN_FLIGHT, row] -= share

    def candidates(
        self, request: RequestIndicators = ANY_REQUEST, now_s: float = 0.0, rows: Rows | None = None
    ) -> Candidates:
        """Return all instances, or those in some rows, for a policy to read; later reports may or may not show."""
        while self._sent and self._sent[0][0] <= now_s - SECONDS_PER_MINUTE:
            self.known.sent_last_minute[self.row_of[self._sent.popleft()[1]]] -= 1.0
        return Candidates(known=self.known, now_s=now_s, request=request, rows=rows)


def _unknown(ids: tuple[str, ...], first_number: int) -> InstanceColumns:
    return InstanceColumns(
        instance_ids=ids,
        numbers=np.arange(first_number, first_number + len(ids), dtype=np.intp),
        reported=np.repeat(OTHERWISE[:, None], len(ids), axis=1),
        reported_s=np.full(len(ids), -math.inf),
        sent_last_minute=np.zeros(len(ids)),
        tier_tpot_s=np.full(len(ids), math.inf),
        tier_closed=np.zeros(len(ids)),
    )
