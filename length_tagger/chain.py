"""Several estimators in a stated order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from length_tagger.contest import Contest, Record
from length_tagger.estimate import Estimate, LengthOutcome, Query, Tagger


class Chain:
    """Asks its estimators in order and takes the first answer; all of them learn.

    A place in the order may be a contest of several. What the client has set bounds any answer: the median of a
    length that is cut at `max_tokens` is the median of the uncut length, cut there.
    """

    def __init__(self, taggers: Sequence[tuple[str, Tagger]]) -> None:
        """Keep the order; each comes with its name."""
        self._taggers = tuple(taggers)

    def estimate(self, query: Query) -> Estimate | None:
        """Give the first answer there is, within what is possible; None where nobody has one."""
        for _, tagger in self._taggers:
            estimate = tagger.estimate(query)
            if estimate is not None:
                return bounded(estimate, query)
        return None

    def reaches(self, query: Query, name: str) -> bool:
        """Tell whether an estimator of that name would be asked: whether nobody before it has an answer."""
        for names, tagger in self._taggers:
            if name in names.split("|"):
                return True
            if tagger.estimate(query) is not None:
                return False
        return False

    def observe(self, outcome: LengthOutcome) -> None:
        """Tell everybody."""
        for _, tagger in self._taggers:
            tagger.observe(outcome)

    def records(self) -> Iterator[tuple[str, str, Record]]:
        """Tell how those estimators fare that are corrected: estimator, model, record."""
        for _, tagger in self._taggers:
            if isinstance(tagger, Contest):
                yield from tagger.records()

    def replaced(self, name: str, tagger: Tagger) -> None:
        """Put another estimator in the place of the one of that name; what outcomes taught of the old one goes."""
        self._taggers = tuple((names, _with(names, old, name, tagger)) for names, old in self._taggers)


def _with(names: str, old: Tagger, name: str, new: Tagger) -> Tagger:
    if name not in names.split("|"):
        return old
    return old.replaced(name, new) if isinstance(old, Contest) else new


def bounded(estimate: Estimate, query: Query) -> Estimate:
    """Hold a median between what the client asked for at least and at most."""
    median_tokens = max(estimate.median_tokens, query.min_tokens or 0)
    if query.max_tokens is not None:
        median_tokens = min(median_tokens, query.max_tokens)
    return estimate if median_tokens == estimate.median_tokens else replace(estimate, median_tokens=median_tokens)


def contested(names: str, taggers: Mapping[str, Tagger], fixed: Sequence[str]) -> Tagger:
    """Make what stands at one place of the order: one estimator, or a contest."""
    if len(taggers) == 1 and not set(taggers) & set(fixed):
        return taggers[names]
    return Contest(taggers, fixed)
