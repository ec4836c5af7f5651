"""A policy at work: who is looked at, who is forecast, who wins, and who comes next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.candidates import Candidates, Rows
from scheduler.expressions import Expression, condition, number
from scheduler.indicators import Column, IndicatorSource, roots_of
from scheduler.policies import entry_named
from scheduler.policies.entry import PolicyEntry
from scheduler.shortlist import Draws, lowest
from scheduler.spec import EXPRESSION, Spec, spec_from

DEFAULT_SHORTLIST = "lmetric"
DELAYS = ("delay_sum_s", "delay_worst_s", "others_preempted")


class Policy:
    """Chooses for one request after the other: `among`, then forecasts of those where needed, then `choose`.

    The shortlist is the `k` best by a cheap score over indicators at hand; with k = 0 that score decides, and where all
    are forecast it is not made. A filter that nobody passes filters nobody: there is always somebody to choose.
    One that `holds` requests has them wait for an instance that `admits` them, for at most `hold_s`.
    """

    def __init__(self, spec: Spec, generator: np.random.Generator) -> None:
        """Make one; ValueError where its formulas are none, or its parts do not go together."""
        entry = _entry_of(spec)
        tie_break = entry.tie_break if spec.tie_break is None else spec.tie_break
        self.text = spec.text
        self.name = spec.name
        self._score = entry.make(spec.parameters, generator)
        self._filter = condition(spec.filter, f"policy: {spec.name}: filter") if spec.filter else None
        self._tie_break = number(tie_break, f"policy: {spec.name}: tie_break") if tie_break else None
        hold = entry.hold if spec.hold is None else spec.hold
        self._hold = condition(hold, f"policy: {spec.name}: hold") if hold else None
        self.holds = self._hold is not None
        self.hold_s = spec.hold_s
        self._sample = entry.sample if spec.sample is None else spec.sample
        self._draws = Draws(generator)
        self._k = 0 if spec.k is None else spec.k
        self._shortlist = Policy(_cheap(spec), generator) if self._k else None
        self.needs = (*entry.needs, *_needs_of(self._filter, self._tie_break, self._shortlist, self._hold))
        roots = list(roots_of(self.needs))
        self.is_blind = not roots  # it looks at nothing
        self.forecasts_read = tuple({root.name for root in roots if root.source is IndicatorSource.FORECAST})
        self.needs_forecast = bool(self.forecasts_read)
        names = {*self.forecasts_read, "predicted_e2e_s"}  # the latter shows where a request would never finish
        self.needs_delays = any(root.name in DELAYS for root in roots)
        self.needs_prefix = any(root.source is IndicatorSource.PREFIX for root in roots)
        self.forecast_columns = tuple(sorted(names | {"prefix_hit_tokens"} if self.needs_prefix else names))
        self.needs_tag = any(root.name == "tag_tokens" for root in roots)
        self.needs_reported = self.holds or any(root.source is IndicatorSource.REPORTED for root in roots)
        if _is_foretold(_needs_of(self._filter)):
            raise ValueError("policy: filter: reads forecasts, which are made after it")

    def among(self, candidates: Candidates) -> Candidates:
        """Leave those who pass the filter, are drawn, and come onto the shortlist."""
        if self._filter is not None:
            passing = np.flatnonzero(self._filter(candidates) == 1.0)
            if 0 < len(passing) < len(candidates):
                candidates = candidates.only(passing, "does not pass the filter")
        if 0 < self._sample < len(candidates):
            candidates = candidates.only(self._draws.some(self._sample, len(candidates)), "was not drawn")
        if self._shortlist is not None and self._k < len(candidates):
            candidates = candidates.only(self._shortlist.lowest(candidates, self._k), "is not on the shortlist")
        return candidates

    def admits(self, candidates: Candidates) -> npt.NDArray[np.bool_]:
        """Tell who may have the request now; what is not known of an instance does not speak for it."""
        if self._hold is None:
            return np.ones(len(candidates), np.bool_)
        admits: npt.NDArray[np.bool_] = self._hold(candidates) == 1.0
        return admits

    def scores(self, candidates: Candidates) -> Column:
        """Score each; once for each request, as a policy may remember what it has seen."""
        return self._score(candidates)

    def lowest(self, candidates: Candidates, k: int) -> Rows:
        """Find the k best, in the order of their rows."""
        tie_break = None if self._tie_break is None else self._tie_break(candidates)
        return lowest(self._score(candidates), k, tie_break)

    def best(self, candidates: Candidates, scores: Column) -> int:
        """Find who wins: the lowest score, then the lowest tie-break, then the first; NaN never wins against a number.

        It is the first of `order`, found faster.
        """
        first = int(scores.argmin())
        score = scores[first]
        if score != score:  # noqa: PLR0124 - NaN
            return int(self.order(candidates, scores)[0])
        if self._tie_break is not None:
            equals = (scores == score).nonzero()[0]
            if len(equals) > 1:
                first = int(equals[lowest(self._tie_break(candidates)[equals], 1)[0]])
        return first

    def order(self, candidates: Candidates, scores: Column) -> Rows:
        """Rank them all, best first; those whose score is not known come last."""
        if self._tie_break is None:
            return scores.argsort(kind="stable")
        return np.lexsort((self._tie_break(candidates), scores))

    def choose(self, candidates: Candidates) -> int:
        """Score them, and find who wins."""
        return self.best(candidates, self._score(candidates))


def policy_from(given: str | Mapping[str, Any], seed: int | None = None) -> Policy:
    """Make a policy from what a user wrote; those that draw do so from the seed."""
    spec = spec_from(given)
    if (spec.k is not None or spec.shortlist is not None) and not _is_foretold(_entry_of(spec).needs):
        raise ValueError(f"policy: {spec.name}: k and shortlist are for policies that need forecasts")
    if spec.shortlist is not None and spec.k is None:
        raise ValueError(f"policy: {spec.name}: shortlist: says nothing without k, as in k = 8")
    if spec.k == 0:
        cheap = _cheap(spec)
        spec = replace(cheap, text=spec.text, filter=spec.filter or cheap.filter, sample=spec.sample or cheap.sample)
    return Policy(spec, np.random.default_rng(seed))


def _entry_of(spec: Spec) -> PolicyEntry:
    if spec.name != EXPRESSION:
        return entry_named(spec.name)
    formula = number(spec.score, f"policy: {EXPRESSION}")
    return PolicyEntry(make=lambda _parameters, _generator: formula, formula=spec.score, source="", needs=formula.needs)


def _cheap(spec: Spec) -> Spec:
    """Give the policy by which a shortlist is made."""
    cheap = spec_from(DEFAULT_SHORTLIST if spec.shortlist is None else spec.shortlist)
    if _is_foretold(_entry_of(cheap).needs):
        raise ValueError(f"policy: {spec.name}: shortlist: {cheap.name} needs forecasts itself")
    return cheap


def _needs_of(*parts: Expression | Policy | None) -> Iterable[str]:
    for part in parts:
        if part is not None:
            yield from part.needs


def _is_foretold(names: Iterable[str]) -> bool:
    return any(root.source is IndicatorSource.FORECAST for root in roots_of(names))
