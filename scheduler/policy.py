"""A policy with its filter, shortlist, tie-break and hold condition: shortlists, scores and ranks candidates."""

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
from scheduler.shortlist import RandomSampler, lowest
from scheduler.spec import EXPRESSION, PolicySpec, spec_from

DEFAULT_SHORTLIST = "lmetric"
DELAYS = ("delay_sum_s", "delay_worst_s", "others_preempted")


class Policy:
    """Chooses an instance for each request: `shortlist`, then forecasts of these if needed, then `choose`.

    The shortlist is the `k` best candidates by a cheap score over known indicators; with k = 0 that score decides, and
    without k there is no shortlist. A filter that no instance passes is ignored, so that there is always a choice.
    If it `holds` requests, they wait for an instance that `admits` them, for at most `hold_s`.
    """

    def __init__(self, spec: PolicySpec, generator: np.random.Generator) -> None:
        """Compile a specification; ValueError if a formula is invalid or parameters contradict each other."""
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
        self._sampler = RandomSampler(generator)
        self._k = 0 if spec.k is None else spec.k
        self._shortlist_policy = Policy(_shortlist_spec(spec), generator) if self._k else None
        self.needs = (*entry.needs, *_needs_of(self._filter, self._tie_break, self._shortlist_policy, self._hold))
        roots = list(roots_of(self.needs))
        self.is_blind = not roots  # it reads no indicators
        self.forecast_fields = tuple({root.name for root in roots if root.source is IndicatorSource.FORECAST})
        self.needs_forecast = bool(self.forecast_fields)
        names = {*self.forecast_fields, "predicted_e2e_s"}  # the latter shows where a request would never finish
        self.needs_delays = any(root.name in DELAYS for root in roots)
        self.needs_prefix = any(root.source is IndicatorSource.PREFIX for root in roots)
        self.forecast_columns = tuple(sorted(names | {"prefix_hit_tokens"} if self.needs_prefix else names))
        self.needs_tag = any(root.name == "tag_tokens" for root in roots)
        self.needs_indicators = self.holds or any(root.source is IndicatorSource.REPORTED for root in roots)
        if _needs_forecast(_needs_of(self._filter)):
            raise ValueError("policy: filter: reads forecasts, which are made only for candidates that pass it")

    def shortlist(self, candidates: Candidates) -> Candidates:
        """Return the candidates that pass the filter, are sampled, and have one of the k best cheap scores."""
        if self._filter is not None:
            passing = np.flatnonzero(self._filter(candidates) == 1.0)
            if 0 < len(passing) < len(candidates):
                candidates = candidates.only(passing, "does not pass the filter")
        if 0 < self._sample < len(candidates):
            candidates = candidates.only(self._sampler.sample(self._sample, len(candidates)), "was not drawn")
        if self._shortlist_policy is not None and self._k < len(candidates):
            candidates = candidates.only(self._shortlist_policy.lowest(candidates, self._k), "is not on the shortlist")
        return candidates

    def admits(self, candidates: Candidates) -> npt.NDArray[np.bool_]:
        """Return which candidates admit the request now; an unknown condition counts as false."""
        if self._hold is None:
            return np.ones(len(candidates), np.bool_)
        admits: npt.NDArray[np.bool_] = self._hold(candidates) == 1.0
        return admits

    def scores(self, candidates: Candidates) -> Column:
        """Score each candidate; call it once per request, because a policy may keep state."""
        return self._score(candidates)

    def lowest(self, candidates: Candidates, k: int) -> Rows:
        """Return the positions of the k best candidates, in ascending order."""
        tie_break = None if self._tie_break is None else self._tie_break(candidates)
        return lowest(self._score(candidates), k, tie_break)

    def best(self, candidates: Candidates, scores: Column) -> int:
        """Return the position of the best: the lowest score, then the lowest tie-break, then the first; NaN comes last.

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
        """Rank all candidates, best first; those with an unknown score come last."""
        if self._tie_break is None:
            return scores.argsort(kind="stable")
        return np.lexsort((self._tie_break(candidates), scores))

    def choose(self, candidates: Candidates) -> int:
        """Score the candidates, and return the position of the best."""
        return self.best(candidates, self._score(candidates))


def policy_from(given: str | Mapping[str, Any], seed: int | None = None) -> Policy:
    """Make a policy from its text or TOML table; the seed is for policies that use random numbers."""
    spec = spec_from(given)
    if (spec.k is not None or spec.shortlist is not None) and not _needs_forecast(_entry_of(spec).needs):
        raise ValueError(f"policy: {spec.name}: k and shortlist are for policies that need forecasts")
    if spec.shortlist is not None and spec.k is None:
        raise ValueError(f"policy: {spec.name}: shortlist: has no effect without k, as in k = 8")
    if spec.k == 0:
        cheap = _shortlist_spec(spec)
        spec = replace(cheap, text=spec.text, filter=spec.filter or cheap.filter, sample=spec.sample or cheap.sample)
    return Policy(spec, np.random.default_rng(seed))


def _entry_of(spec: PolicySpec) -> PolicyEntry:
    if spec.name != EXPRESSION:
        return entry_named(spec.name)
    formula = number(spec.score, f"policy: {EXPRESSION}")
    return PolicyEntry(make=lambda _parameters, _generator: formula, formula=spec.score, source="", needs=formula.needs)


def _shortlist_spec(spec: PolicySpec) -> PolicySpec:
    """Return the specification of the policy that makes the shortlist."""
    cheap = spec_from(DEFAULT_SHORTLIST if spec.shortlist is None else spec.shortlist)
    if _needs_forecast(_entry_of(cheap).needs):
        raise ValueError(f"policy: {spec.name}: shortlist: {cheap.name} needs forecasts itself")
    return cheap


def _needs_of(*parts: Expression | Policy | None) -> Iterable[str]:
    for part in parts:
        if part is not None:
            yield from part.needs


def _needs_forecast(names: Iterable[str]) -> bool:
    return any(root.source is IndicatorSource.FORECAST for root in roots_of(names))
