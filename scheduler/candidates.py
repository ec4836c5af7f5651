"""What a policy sees: the instances that a request could go to, as columns of numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.indicators import INDICATORS, ROW_OF, Column, require_indicator

Places = npt.NDArray[np.intp]
SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A request as policies know it; `prefix_class` is the same for requests that share a cached prefix."""

    prompt_tokens: int = 1
    tag_tokens: float = math.nan
    prefix_class: Hashable = None


ANY_REQUEST = Facts()


@dataclass(slots=True, kw_only=True)
class InstanceColumns:
    """What is known of all instances: an array per fact, and in each a value per instance, in the order of their ids.

    `numbers` tell instances apart for as long as the process lives, and are small. `told` has a row for each indicator
    of `TOLD`; `told_s` is the time at which that was so. `sent_lately` counts what this scheduler sent within a minute.
    """

    instance_ids: tuple[str, ...]
    numbers: Places
    told: npt.NDArray[np.float64]
    told_s: Column
    sent_lately: Column


@dataclass(slots=True, kw_only=True)
class Candidates:
    """All instances, or those at some places; in the order of their ids, so that of equals the least id comes first.

    `columns` holds what was added for this request, and what was looked up and derived already. `trail` says why others
    were left out on the way here, and which places there were before each time.
    """

    known: InstanceColumns
    now_s: float = 0.0
    facts: Facts = ANY_REQUEST
    places: Places | None = None
    columns: dict[str, Column] = field(default_factory=dict)
    trail: tuple[tuple[str, Places | None], ...] = ()

    def __len__(self) -> int:
        """How many there are."""
        return len(self.known.instance_ids) if self.places is None else len(self.places)

    def __getitem__(self, name: str) -> Column:
        """Give an indicator, a value per instance, NaN where it is not known."""
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = self._found(name)
        return column

    def add(self, columns: Mapping[str, Column]) -> None:
        """Add indicators of this request."""
        self.columns.update(columns)

    def only(self, chosen: Places, why: str = "") -> Candidates:
        """Leave some of them, given by where they are among these, in ascending order; and say why, if that matters."""
        return Candidates(
            known=self.known,
            now_s=self.now_s,
            facts=self.facts,
            places=chosen if self.places is None else self.places[chosen],
            columns={name: column[chosen] for name, column in self.columns.items()},
            trail=(*self.trail, (why, self.places)) if why else self.trail,
        )

    def left_out(self) -> Iterator[tuple[str, str]]:
        """Name those that were left out, each with the reason."""
        after = self._all_places(self.places)
        for why, places in reversed(self.trail):
            before = self._all_places(places)
            for place in np.setdiff1d(before, after, assume_unique=True).tolist():
                yield self.known.instance_ids[place], why
            after = before

    def place(self, which: int) -> int:
        """Tell where one of these is among all instances."""
        return which if self.places is None else int(self.places[which])

    def instance_id(self, which: int) -> str:
        """Name one of these."""
        return self.known.instance_ids[self.place(which)]

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """Name them all."""
        ids = self.known.instance_ids
        return ids if self.places is None else tuple([ids[place] for place in self.places.tolist()])

    @property
    def numbers(self) -> Places:
        """Numbers that tell instances apart from one request to the next."""
        return self.known.numbers if self.places is None else self.known.numbers[self.places]

    @property
    def prompt_tokens(self) -> int:
        """How long the request's prompt is."""
        return self.facts.prompt_tokens

    def _found(self, name: str) -> Column:
        row = ROW_OF.get(name)
        if row is not None:
            told = self._of_these(self.known.told[row])
            return told if name != "requests_per_minute" else self._requests_per_minute(told)
        indicator = INDICATORS.get(name) or require_indicator(name)
        if indicator.formula is not None:
            return indicator.formula(self)
        if name == "age_s":
            return self.now_s - self._of_these(self.known.told_s)
        if name in ("prompt_tokens", "tag_tokens"):
            return np.full(len(self), getattr(self.facts, name), np.float64)
        return np.full(len(self), indicator.otherwise)

    def _requests_per_minute(self, told: Column) -> Column:
        """What this scheduler sent, or what was told if that is more; that passes as the minute does."""
        left = np.clip(1.0 - self["age_s"] / SECONDS_PER_MINUTE, 0.0, 1.0)
        return np.fmax(self._of_these(self.known.sent_lately), told * left)

    def _of_these(self, column: Column) -> Column:
        return column if self.places is None else column[self.places]

    def _all_places(self, places: Places | None) -> Places:
        return np.arange(len(self.known.instance_ids)) if places is None else places
