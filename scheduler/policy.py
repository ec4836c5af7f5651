"""A policy with its filter, shortlist, tie-break and hold condition: shortlists, scores and ranks candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.forecast_result import ALL_KEPT, FIRST_TOKEN, OTHERS_KEPT, OTHERS_KEPT_AND_START, TO_THE_END
from scheduler.candidates import Candidates, Rows
from scheduler.columns import Column
from scheduler.expressions import Expression, condition, number
from scheduler.indicators import IndicatorSource, roots_of
from scheduler.policies import entry_named
from scheduler.policies.entry import PolicyEntry
from scheduler.sessions import SESSION_HERE
from scheduler.shortlist import RandomSampler, lowest
from scheduler.spec import (
    ALWAYS,
    BY_FORECAST,
    DECODE_FIRST,
    EXPRESSION,
    LEG_OPTIONS,
    NEVER,
    PAIR,
    PREFILL_FIRST,
    PolicySpec,
    spec_from,
)

DEFAULT_SHORTLIST = "lmetric"
ON_OTHERS = (
    "delay_sum_s", "delay_worst_s", "others_preempted", "others_missed", "gain_before", "gain_after", "least_slack_s",
)  # fmt: skip
# A condition of ours compares these with thresholds, beyond which nothing has to be simulated.
VERDICTS = {
    "predicted_attained", "others_missed", "predicted_preemptions", "others_preempted", "predicted_queue_s"
}  # fmt: skip
OF_START = {"predicted_ttft_s", "predicted_queue_s"}  # known at the first token
LEAST_SLACK = "least_slack_s"  # which background requests compare with the policy's `min_slack_s`
# What keeping a session on its instance may cost, and forecasts about deadlines, which it may not make worse.
SESSION_COST, OF_DEADLINES = "predicted_e2e_s", ("predicted_attained", "others_missed")
SESSION_COST_OF_INDICATORS = "queued_prefill_s"  # where a policy reads no forecasts


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRules:
    """How a policy places requests that may have two legs.

    `prefill` chooses the instance of the prefill leg. `disaggregate` is `forecast`, `always` or `never`, or empty
    where `condition` says for each candidate whether a request that goes there has two legs.
    """

    prefill: Policy
    disaggregate: str
    condition: Expression | None
    order: str

    @property
    def described(self) -> str:
        """Which requests have two legs, in one word or as a condition."""
        return self.disaggregate or (self.condition.text if self.condition is not None else "")

    def applies_to(self, candidates: Candidates) -> npt.NDArray[np.bool_]:
        """Return for which candidates the condition is true; an unknown one counts as false."""
        if self.condition is None:
            return np.full(len(candidates), self.disaggregate == ALWAYS)
        return self.condition.holds(candidates)


class Policy:
    """Chooses an instance for each request: `shortlist`, then forecasts of these if needed, then `choose`.

    The shortlist is the `k` best candidates by a cheap score over known indicators; with k = 0 that score decides, and
    without k there is no shortlist. A filter that no instance passes is ignored, so that there is always a choice.
    If it `holds` requests, they wait for an instance that `admits` them, for at most `hold_s`. Where instances have
    roles, it chooses among those that serve whole requests or decode legs; `legs` has the rules for prefill legs.
    """

    def __init__(self, spec: PolicySpec, generator: np.random.Generator, *, is_part: bool = False) -> None:
        """Compile a specification; ValueError if a formula is invalid or parameters contradict each other.

        A policy that is part of another one has no rules for legs.
        """
        entry = _entry_of(spec)
        tie_break = entry.tie_break if spec.tie_break is None else spec.tie_break
        self.text = spec.text
        self.name = spec.name
        self._score = entry.make(spec.parameters, generator)
        self._filter = condition(spec.filter, f"policy: {spec.name}: filter") if spec.filter else None
        self._tie_break = number(tie_break, f"policy: {spec.name}: tie_break") if tie_break else None
        hold = _hold_of(spec, entry)
        self._hold = condition(hold, f"policy: {spec.name}: hold") if hold else None
        # a condition of the user's own holds for all requests
        no_other_misses = entry.no_other_misses.format(**spec.parameters) if spec.hold is None else ""
        self._no_other_misses = condition(no_other_misses, f"policy: {spec.name}") if no_other_misses else self._hold
        eligible = entry.eligible.format(**spec.parameters) if spec.hold is None else ""
        self._eligible = condition(eligible, f"policy: {spec.name}") if eligible else None
        self.holds = self._hold is not None
        self.keeps_deadlines = self._no_other_misses is not self._hold
        self.hold_s = spec.hold_s
        self.length_quantiles = spec.length_quantiles
        self._sample = entry.sample if spec.sample is None else spec.sample
        self._sampler = RandomSampler(generator)
        self._k = 0 if spec.k is None else spec.k
        self._shortlist_policy = Policy(_shortlist_spec(spec), generator, is_part=True) if self._k else None
        self.legs = None if is_part else _leg_rules(spec, entry, generator)
        applies = None if self.legs is None else self.legs.condition
        parts = (self._filter, self._tie_break, self._shortlist_policy, self._hold, self._no_other_misses, applies)
        self.needs = (*entry.needs, *_needs_of(*parts))
        self._session_affinity_s = spec.session_affinity
        session_needs = () if spec.session_affinity is None else _needs_of_sessions(self.needs)
        self.needs = (*self.needs, *session_needs)
        roots = list(roots_of(self.needs))
        self.reads_no_indicators = not roots
        self.forecast_fields = tuple(_forecast_fields(self.needs))
        self.needs_forecast = bool(self.forecast_fields)
        names = {*self.forecast_fields, "predicted_e2e_s"}  # the latter shows where a request would never finish
        if self.keeps_deadlines:
            names |= {"predicted_ttft_s", "predicted_queue_s"}  # which say how late a request may start
        self.needs_delays = any(root.name in ON_OTHERS for root in roots)
        self._reads = (*entry.needs, *_needs_of(self._filter, self._tie_break, applies), *session_needs)
        self._until = {background: self._simulated_until(background=background) for background in (False, True)}
        self.long = spec.parameters.get("long", 0.0) if self.keeps_deadlines else 0.0  # 0: it defers no request
        # that `least_slack_s` has to reach: of best effort, and of late requests
        self.min_slack_s = tuple(spec.parameters[name] for name in entry.least_slack or ()) or (0.0, 0.0)
        self.needs_session = any(root.source is IndicatorSource.SESSION for root in roots)
        if spec.length_quantiles > 1 and not self.needs_forecast:
            raise ValueError(f"policy: {spec.name}: length_quantiles: is for policies that read forecasts")
        self.needs_prefix = any(root.source is IndicatorSource.PREFIX for root in roots)
        self.forecast_columns = tuple(sorted(names | {"prefix_hit_tokens"} if self.needs_prefix else names))
        self.needs_tag = any(root.name == "tag_tokens" for root in roots)
        self.needs_indicators = self.holds or any(root.source is IndicatorSource.REPORTED for root in roots)
        if _needs_forecast(_needs_of(self._filter)):
            raise ValueError("policy: filter: reads forecasts, which are made only for candidates that pass it")

    def until(self, *, background: bool) -> int:
        """Return how far forecasts have to be simulated for a background request, or for another."""
        return self._until[background]

    def _simulated_until(self, *, background: bool) -> int:
        if self.length_quantiles > 1:
            return TO_THE_END
        if not self.holds:
            return FIRST_TOKEN if _forecast_fields(self.needs) <= OF_START and not self.needs_delays else TO_THE_END
        if not self.keeps_deadlines:
            return TO_THE_END
        fields = _forecast_fields((*self._reads, *_needs_of(self._no_other_misses if background else self._hold)))
        if not fields <= (VERDICTS | {LEAST_SLACK} if background else VERDICTS):
            return TO_THE_END
        if not background:
            return ALL_KEPT
        return OTHERS_KEPT_AND_START if "predicted_queue_s" in fields else OTHERS_KEPT

    @property
    def parts(self) -> tuple[Policy, ...]:
        """The policies by which legs are placed: this one, and that of prefill legs."""
        return (self,) if self.legs is None else (self, self.legs.prefill)

    def shortlist(self, candidates: Candidates) -> Candidates:
        """Return the candidates that pass the filter, are sampled, and have one of the k best cheap scores."""
        if self._filter is not None:
            passing = np.flatnonzero(self._filter.holds(candidates))
            if 0 < len(passing) < len(candidates):
                candidates = candidates.only(passing, "does not pass the filter")
        if 0 < self._sample < len(candidates):
            sampled = self._sampler.sample(self._sample, len(candidates))
            candidates = candidates.only(self._and_session(candidates, sampled), "was not drawn")
        if self._shortlist_policy is not None and self._k < len(candidates):
            best = self._shortlist_policy.lowest(candidates, self._k)
            candidates = candidates.only(self._and_session(candidates, best), "is not on the shortlist")
        return candidates

    def _and_session(self, candidates: Candidates, positions: Rows) -> Rows:
        """Add the instance of the request's session to some positions."""
        if self._session_affinity_s is None or SESSION_HERE not in candidates.columns:
            return positions
        both: Rows = np.union1d(positions, np.flatnonzero(candidates[SESSION_HERE]))
        return both

    def with_session_first(self, candidates: Candidates, order: Rows, admits: npt.NDArray[np.bool_] | None) -> Rows:
        """Put the instance of the request's session first where that costs little time and no deadline.

        The best instance of the ranking keeps its place unless the other admits the request as well, is as likely to
        attain its deadlines, makes no more of the others miss theirs, and is slower by the affinity at most.
        """
        if self._session_affinity_s is None or SESSION_HERE not in candidates.columns:
            return order
        here = np.flatnonzero(candidates[SESSION_HERE][order])
        if len(here) == 0 or here[0] == 0:
            return order
        best, other = order[0], order[here[0]]
        if admits is not None and admits[best] and not admits[other]:
            return order
        cost = candidates[SESSION_COST if self.needs_forecast else SESSION_COST_OF_INDICATORS]
        if not cost[other] <= cost[best] + self._session_affinity_s:
            return order
        if self.needs_forecast:
            attained, missed = (candidates[name] for name in OF_DEADLINES)
            if attained[other] < attained[best] or missed[other] > missed[best]:
                return order
        return np.concatenate(([other], order[order != other]))

    def admits(self, candidates: Candidates, *, background: bool = False) -> npt.NDArray[np.bool_]:
        """Return which candidates admit the request now; an unknown condition counts as false.

        A `background` request is late already, or has no deadlines: it only must not make others miss theirs.
        """
        condition = self._no_other_misses if background else self._hold
        if condition is None:
            return np.ones(len(candidates), np.bool_)
        return condition.holds(candidates)

    def eligible(self, candidates: Candidates) -> Candidates:
        """Leave out the candidates that cannot admit the request whatever they forecast, unless that is all of them."""
        if self._eligible is None:
            return candidates
        may_admit = np.flatnonzero(self._eligible.holds(candidates))
        if not 0 < len(may_admit) < len(candidates):
            return candidates
        return candidates.only(may_admit, "is of a tier that does not admit the request")

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
    reads = _score_reads_forecasts(spec) or (spec.k != 0 and _hold_reads_forecasts(spec))
    if (spec.k is not None or spec.shortlist is not None) and not reads:
        raise ValueError(f"policy: {spec.name}: k and shortlist are for policies that need forecasts")
    if spec.shortlist is not None and spec.k is None:
        raise ValueError(f"policy: {spec.name}: shortlist: has no effect without k, as in k = 8")
    if spec.k == 0:
        cheap = _shortlist_spec(spec)
        legs = {name: getattr(spec, name) for name in LEG_OPTIONS}
        sample = spec.sample or cheap.sample
        affinity = spec.session_affinity
        spec = replace(
            cheap, text=spec.text, filter=spec.filter or cheap.filter, sample=sample, session_affinity=affinity, **legs
        )
    return Policy(spec, np.random.default_rng(seed))


def rules_of(name: str) -> LegRules:
    """Return how a policy places requests that may have two legs, unless its options say otherwise."""
    rules = policy_from(name).legs
    assert rules is not None
    return rules


def _forecast_fields(needs: Iterable[str]) -> set[str]:
    """Return the fields of forecasts that indicators are made of."""
    return {root.name for root in roots_of(needs) if root.source is IndicatorSource.FORECAST}


def _entry_of(spec: PolicySpec) -> PolicyEntry:
    if spec.name != EXPRESSION:
        return entry_named(spec.name)
    formula = number(spec.score, f"policy: {EXPRESSION}")
    return PolicyEntry(make=lambda _parameters, _generator: formula, formula=spec.score, source="", needs=formula.needs)


def _score_reads_forecasts(spec: PolicySpec) -> bool:
    return _needs_forecast(_entry_of(spec).needs)


def _hold_of(spec: PolicySpec, entry: PolicyEntry) -> str:
    return entry.hold.format(**spec.parameters) if spec.hold is None else spec.hold


def _hold_reads_forecasts(spec: PolicySpec) -> bool:
    hold = _hold_of(spec, _entry_of(spec))
    return bool(hold) and _needs_forecast(condition(hold, f"policy: {spec.name}: hold").needs)


def _shortlist_spec(spec: PolicySpec) -> PolicySpec:
    """Return the specification of the policy that makes the shortlist: its own score, where that needs no forecasts."""
    if spec.shortlist is None and not _score_reads_forecasts(spec):
        return replace(spec, filter="", sample=0, k=None, hold="", session_affinity=None, length_quantiles=1)
    cheap = spec_from(DEFAULT_SHORTLIST if spec.shortlist is None else spec.shortlist)
    if _needs_forecast(_entry_of(cheap).needs):
        raise ValueError(f"policy: {spec.name}: shortlist: {cheap.name} needs forecasts itself")
    return cheap


def _leg_rules(spec: PolicySpec, entry: PolicyEntry, generator: np.random.Generator) -> LegRules:
    """Compile how a policy places requests that may have two legs."""
    name, reads_forecasts = f"policy: {spec.name}", _needs_forecast(entry.needs)
    text = entry.disaggregate.format(**spec.parameters) if spec.disaggregate is None else spec.disaggregate
    text = text or (BY_FORECAST if reads_forecasts else ALWAYS)
    if text == BY_FORECAST and not reads_forecasts:
        raise ValueError(f"{name}: disaggregate: forecast is for policies whose score reads forecasts")
    is_condition = text not in (BY_FORECAST, ALWAYS, NEVER)
    applies = condition(text, f"{name}: disaggregate") if is_condition else None
    if _needs_forecast(_needs_of(applies)):
        raise ValueError(f'{name}: disaggregate: reads forecasts; disaggregate = "forecast" compares them')
    orders = (PAIR, DECODE_FIRST) if reads_forecasts else (DECODE_FIRST, PREFILL_FIRST)
    order = spec.order or orders[0]
    if order not in orders:
        kind = "reads" if reads_forecasts else "reads no"
        use = " or ".join(orders)
        raise ValueError(f"{name}: order: {order} is not for policies whose score {kind} forecasts; use {use}")
    if reads_forecasts and order == DECODE_FIRST and text != BY_FORECAST:
        raise ValueError(f'{name}: order: decode-first needs disaggregate = "forecast" where the score reads forecasts')
    return LegRules(
        prefill=Policy(_prefill_spec(spec, entry), generator, is_part=True),
        disaggregate="" if is_condition else text,
        condition=applies,
        order=order,
    )


def _prefill_spec(spec: PolicySpec, entry: PolicyEntry) -> PolicySpec:
    """Return the specification of the policy of prefill legs, which never wait."""
    text = spec.prefill or entry.prefill
    if not text:
        return replace(spec, hold="", length_quantiles=1)  # a prefill leg has one token
    try:
        prefill = spec_from(text)
    except ValueError as error:
        raise ValueError(f"policy: {spec.name}: prefill: {str(error).removeprefix('policy: ')}") from None
    if prefill.hold or any(getattr(prefill, option) is not None for option in LEG_OPTIONS):
        raise ValueError(f"policy: {spec.name}: prefill: cannot have hold, {', '.join(LEG_OPTIONS)}")
    if prefill.k is not None and not _needs_forecast(_entry_of(prefill).needs):
        raise ValueError(f"policy: {spec.name}: prefill: k is for policies that need forecasts")
    affinity = spec.session_affinity if prefill.session_affinity is None else prefill.session_affinity
    return replace(prefill, hold="", session_affinity=affinity)


def _needs_of(*parts: Expression | Policy | None) -> Iterable[str]:
    for part in parts:
        if part is not None:
            yield from part.needs


def _needs_of_sessions(needs: Iterable[str]) -> tuple[str, ...]:
    """Return what session affinity reads beside what the policy does."""
    costs = (SESSION_COST, *OF_DEADLINES) if _needs_forecast(needs) else (SESSION_COST_OF_INDICATORS,)
    return (SESSION_HERE, *costs)


def _needs_forecast(names: Iterable[str]) -> bool:
    return any(root.source is IndicatorSource.FORECAST for root in roots_of(names))
