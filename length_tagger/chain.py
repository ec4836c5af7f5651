"""Several estimators in a given order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from length_tagger.estimate import Estimate, LengthOutcome, Query, Tagger
from length_tagger.selection import Accuracy, Selector


class Chain:
    """Returns the first estimate of its estimators, in order; all of them learn from outcomes.

    An entry of the order may be a selector of several estimators. The client's limits bound every estimate: the median
    of a length that is cut at `max_tokens` is the median of the uncut length, cut there.
    """

    def __init__(self, taggers: Sequence[tuple[str, Tagger]]) -> None:
        """Keep the estimators in order, each with its name."""
        self._taggers = tuple(taggers)

    def estimate(self, query: Query) -> Estimate | None:
        """Return the first estimate, within the client's limits; None if no estimator has one."""
        for _, tagger in self._taggers:
            estimate = tagger.estimate(query)
            if estimate is not None:
                return bounded(estimate, query)
        return None

    def reaches(self, query: Query, name: str) -> bool:
        """Whether an estimator would be used, because no earlier one has an estimate."""
        for names, tagger in self._taggers:
            if name in names.split("|"):
                return True
            if tagger.estimate(query) is not None:
                return False
        return False

    def observe(self, outcome: LengthOutcome) -> None:
        """Pass an outcome to all estimators."""
        for _, tagger in self._taggers:
            tagger.observe(outcome)

    def records(self) -> Iterator[tuple[str, str, Accuracy]]:
        """Yield the accuracy of the estimators in selectors: estimator, model, accuracy."""
        for _, tagger in self._taggers:
            if isinstance(tagger, Selector):
                yield from tagger.records()

    def replaced(self, name: str, tagger: Tagger) -> None:
        """Replace an estimator by name; the accuracy of the old one is dropped."""
        self._taggers = tuple((names, _with(names, old, name, tagger)) for names, old in self._taggers)


def _with(names: str, old: Tagger, name: str, new: Tagger) -> Tagger:
    if name not in names.split("|"):
        return old
    return old.replaced(name, new) if isinstance(old, Selector) else new


def bounded(estimate: Estimate, query: Query) -> Estimate:
    """Limit a median to the client's min_tokens and max_tokens."""
    median_tokens = max(estimate.median_tokens, query.min_tokens or 0)
    if query.max_tokens is not None:
        median_tokens = min(median_tokens, query.max_tokens)
    return estimate if median_tokens == estimate.median_tokens else replace(estimate, median_tokens=median_tokens)


def selector_of(names: str, taggers: Mapping[str, Tagger], fixed: Sequence[str]) -> Tagger:
    """Create one entry of the order: a single estimator, or a selector."""
    if len(taggers) == 1 and not set(taggers) & set(fixed):
        return taggers[names]
    return Selector(taggers, fixed)
