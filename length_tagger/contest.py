"""Estimators side by side: corrected by what became of what they said, and the one that was closer is believed."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from length_tagger.estimate import MOST_TOKENS, Estimate, LengthOutcome, Query, Tagger
from length_tagger.keys import exact_key_of

MOST_PENDING = 16_384  # requests whose answers are under way
MOST_MODELS = 256
SLOWEST = 1 / 128  # of the distance to a new outcome that an average moves
PRIOR = 8  # outcomes for which nothing is worth changing one's mind
CLIP = 1.0  # no single outcome counts for more than a factor of e
MOST_BIAS = 3.0
CLEARLY = 0.9  # of the other's error must be one's own to be asked instead of who comes first
DRIFT = math.log(1.5)


@dataclass(slots=True, kw_only=True)
class Record:
    """How one estimator has fared with one model lately: its bias, and what is left when that is taken away."""

    bias: float = 0.0
    error: float = 0.0
    num: int = 0

    @property
    def drifted(self) -> bool:
        """Tell whether the model's answers are no longer those that the estimator learned from."""
        return abs(self.bias) > DRIFT

    def learn(self, error: float) -> None:
        """Take in the logarithm of real over estimated length."""
        rate = max(SLOWEST, 1 / (self.num + PRIOR))
        left = error - self.bias
        self.error += max(SLOWEST, 1 / (self.num + 1)) * (min(abs(left), 2 * CLIP) - self.error)
        self.bias += rate * min(CLIP, max(-CLIP, left))
        self.bias = min(MOST_BIAS, max(-MOST_BIAS, self.bias))
        self.num += 1


class Contest:
    """Asks all its estimators, believes the one that was closest for this model lately, and the first until then.

    Those that do not learn by themselves, `fixed`, have their bias for each model taken away.
    """

    def __init__(self, taggers: Mapping[str, Tagger], fixed: Sequence[str]) -> None:
        """Start without any record."""
        self._taggers = dict(taggers)
        self._fixed = frozenset(fixed)
        self._records: OrderedDict[str, dict[str, Record]] = OrderedDict()
        self._pending: OrderedDict[int, dict[str, float]] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """Who takes part."""
        return tuple(self._taggers)

    def estimate(self, query: Query) -> Estimate | None:
        """Ask all; remember what each said until the outcome is known."""
        said = {
            name: estimate for name, tagger in self._taggers.items() if (estimate := tagger.estimate(query)) is not None
        }
        if not said:
            return None
        name = exact_key_of(query.keys)
        if name is not None:
            self._pending[name] = {who: math.log(estimate.median_tokens) for who, estimate in said.items()}
            self._pending.move_to_end(name)
            if len(self._pending) > MOST_PENDING:
                self._pending.popitem(last=False)
        records = self._records.get(query.model, {})
        chosen = self._closest(list(said), records)
        return self._corrected(said[chosen], records.get(chosen), chosen)

    def _closest(self, names: list[str], records: Mapping[str, Record]) -> str:
        best = names[0]
        for name in names[1:]:
            mine, other = records.get(name), records.get(best)
            if mine is None or other is None or min(mine.num, other.num) < PRIOR:
                continue
            if mine.error < CLEARLY * other.error:
                best = name
        return best

    def _corrected(self, estimate: Estimate, record: Record | None, name: str) -> Estimate:
        if record is None or name not in self._fixed:
            return estimate
        median_tokens = min(float(MOST_TOKENS), max(1.0, estimate.median_tokens * math.exp(record.bias)))
        return replace(estimate, median_tokens=median_tokens)

    def observe(self, outcome: LengthOutcome) -> None:
        """Learn how far off each was; an answer that was cut says nothing of estimates beyond the cut."""
        name = exact_key_of(outcome.keys)
        said = None if name is None else self._pending.get(name)
        if said is not None:
            records = self._records.setdefault(outcome.model, {})
            self._records.move_to_end(outcome.model)
            if len(self._records) > MOST_MODELS:
                self._records.popitem(last=False)
            log = math.log(outcome.output_tokens)
            for who, estimated in said.items():
                record = records.setdefault(who, Record())
                corrected = estimated + (record.bias if who in self._fixed else 0.0)
                if not (outcome.cut and corrected >= log):
                    record.learn(log - estimated)
        for tagger in self._taggers.values():
            tagger.observe(outcome)

    def replaced(self, name: str, tagger: Tagger) -> Contest:
        """Make the same contest with another estimator of that name, which has no record yet."""
        new = Contest({**self._taggers, name: tagger}, tuple(self._fixed))
        for model, records in self._records.items():
            new._records[model] = {who: record for who, record in records.items() if who != name}
        return new

    def records(self) -> Iterator[tuple[str, str, Record]]:
        """Go through what is known of whom: estimator, model, record."""
        for model, records in self._records.items():
            for name, record in records.items():
                yield name, model, record
