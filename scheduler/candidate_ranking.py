"""One request's candidates: what was heard of each, who is first, and who would still do if all others fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from predictor.forecast_result import Forecast
from scheduler.candidates import Candidates
from scheduler.indicators import Column
from scheduler.policy import Policy


class CandidateStatus(Enum):
    """What became of a candidate."""

    UNASKED = "unasked"  # its policy looks at no state
    FORECAST = "forecast"  # compared by its forecast
    INDICATORS = "indicators"  # compared by what was known of it
    LAST_INDICATORS = "last_indicators"  # nobody had a forecast: compared by what was known of it
    NOT_SHORTLISTED = "not_shortlisted"  # not looked at: a filter, a sample or a shortlist left it out
    REFUSED = "refused"  # it could never serve the request
    LATE = "late"
    DOWN = "down"
    EXCLUDED = "excluded"  # the caller did not want it
    INVALID = "invalid"  # its answer made no sense
    DRAINING = "draining"  # it finishes what it has
    STOPPED = "stopped"  # its engine does not run


COMPARED = frozenset({CandidateStatus.UNASKED, CandidateStatus.FORECAST, CandidateStatus.INDICATORS})

# Nobody has compared these, but their engines may well work: those with the better chances first.
LAST_RESORTS = {
    CandidateStatus.NOT_SHORTLISTED: -1,
    CandidateStatus.LATE: 0,
    CandidateStatus.LAST_INDICATORS: 0,
    CandidateStatus.INVALID: 1,
    CandidateStatus.DOWN: 1,
    CandidateStatus.DRAINING: 2,
}


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One instance in one decision.

    `version` counts the promises that its forecast knows of, `promised` those that are known to have been made since.
    `indicators` are the last ones known, so old; `unseen` counts requests that were sent there since without a promise.
    `read` is what the policy read of it when it decided without forecasts. `admits` tells whether the request may go
    there now, where the policy holds requests.
    """

    instance_id: str
    fate: CandidateStatus = CandidateStatus.UNASKED
    forecast: Forecast | None = None
    version: int = 0
    epoch: int = 0
    promised: int = 0
    indicators: Mapping[str, float] = field(default_factory=dict)
    age_s: float = 0.0
    read: Mapping[str, float] = field(default_factory=dict)
    unseen: int = 0
    engine_failed: bool = False  # lately, say those who sent requests there
    score: float | None = None
    admits: bool = True
    note: str = ""
    answered_s: float = 0.0

    @property
    def is_compared(self) -> bool:
        """Tell whether a policy compares it with others."""
        return self.fate in COMPARED and not self.engine_failed

    @property
    def expected(self) -> Forecast | None:
        """Its forecast, as it is after what was promised since."""
        if self.forecast is not None and self.promised:
            return behind(self.forecast, self.promised)
        return self.forecast

    @property
    def would_never_finish(self) -> bool:
        """Tell whether the request would, as things stand, never be done there."""
        return self.forecast is not None and self.forecast.e2e_s == math.inf


Ranking = Callable[[Sequence[Candidate]], list[Candidate]]  # by a policy, best first; it notes their scores


def behind(forecast: Forecast, num_requests: int) -> Forecast:
    """Correct a forecast for requests that were promised to the instance since, whom nobody has simulated.

    Each is taken to keep this one waiting for as long as its own prefill, or a hundredth of its time there: enough to
    tell equal instances apart until the next forecast, which knows better.
    """
    if forecast.e2e_s == math.inf:
        return forecast
    delay_s = num_requests * max(forecast.ttft_s - forecast.queue_s, forecast.e2e_s / 100)
    return replace(
        forecast,
        queue_s=forecast.queue_s + delay_s,
        ttft_s=forecast.ttft_s + delay_s,
        e2e_s=forecast.e2e_s + delay_s,
    )


def order(candidates: Sequence[Candidate], ranking: Ranking) -> list[Candidate]:
    """Rank everybody who might serve the request.

    First those that the policy could compare and that would ever finish; then those that were not compared; last those
    that, as things stand, would never finish.
    """
    compared = [candidate for candidate in candidates if candidate.is_compared]
    ranked = ranking(compared) if compared else []
    able = [candidate for candidate in ranked if not candidate.would_never_finish]
    never = [candidate for candidate in ranked if candidate.would_never_finish]
    return [*able, *last_resorts([one for one in candidates if not one.is_compared]), *never]


def last_resorts(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Rank those whom nobody has compared: most likely to work, least busy when last heard of."""
    able = [candidate for candidate in candidates if candidate.fate in LAST_RESORTS or candidate.fate in COMPARED]
    return sorted(able, key=_fallback_key)


def _fallback_key(candidate: Candidate) -> tuple[bool, int, bool, float, str]:
    load = candidate.unseen + sum(
        candidate.indicators.get(name, 0.0) for name in ("num_running", "num_waiting", "num_reserved")
    )
    return (
        candidate.engine_failed,
        LAST_RESORTS.get(candidate.fate, 0),
        not candidate.indicators,
        load,
        candidate.instance_id,
    )


# How policies rank.


def by_forecasts(policy: Policy, known: Candidates) -> Ranking:
    """Rank by a policy over forecasts, among all of whom something is known; anew each time, as forecasts change."""
    place_of = {known.instance_id(place): place for place in range(len(known))}

    def ranking(compared: Sequence[Candidate]) -> list[Candidate]:
        by_place = sorted(compared, key=lambda candidate: place_of[candidate.instance_id])
        some = known.only(np.array([place_of[candidate.instance_id] for candidate in by_place], np.intp))
        forecasts = [candidate.expected for candidate in by_place]
        some.add(forecast_columns(forecasts, policy.foretold))
        if policy.needs_prefix:
            some.add(forecast_columns(forecasts, ("prefix_hit_tokens",)))
        scores = policy.scores(some)
        for candidate, score in zip(by_place, scores.tolist(), strict=True):
            candidate.score = score
        ranked = [by_place[place] for place in policy.order(some, scores).tolist()]
        if policy.holds:  # those first to whom the request may go now
            for candidate, admits in zip(by_place, policy.admits(some).tolist(), strict=True):
                candidate.admits = admits
            ranked.sort(key=lambda candidate: not candidate.admits)
        return ranked

    return ranking


def as_ranked(ranked: Sequence[Candidate]) -> Ranking:
    """Rank as was ranked before, and those that were not by the score that they had then.

    A policy that remembers what it has seen is asked once for each request.
    """
    place_of = {candidate.instance_id: place for place, candidate in enumerate(ranked)}

    def rank(candidate: Candidate) -> tuple[int, float]:
        score = math.inf if candidate.score is None or math.isnan(candidate.score) else candidate.score
        return place_of.get(candidate.instance_id, len(place_of)), score

    def ranking(compared: Sequence[Candidate]) -> list[Candidate]:
        return sorted(compared, key=rank)

    return ranking


FORETOLD: Mapping[str, Callable[[Forecast], float | None]] = {
    "predicted_ttft_s": lambda forecast: forecast.ttft_s,
    "predicted_e2e_s": lambda forecast: forecast.e2e_s,
    "predicted_tpot_s": lambda forecast: forecast.tpot_s,
    "predicted_queue_s": lambda forecast: forecast.queue_s,
    "predicted_preemptions": lambda forecast: forecast.num_preemptions,
    "others_preempted": lambda forecast: forecast.others_preempted,
    "delay_sum_s": lambda forecast: forecast.delay_sum_s,
    "delay_worst_s": lambda forecast: forecast.delay_worst_s,
    "prefix_hit_tokens": lambda forecast: forecast.prefix_hit_tokens,
}


def forecast_columns(forecasts: Sequence[Forecast | None], names: Collection[str]) -> dict[str, Column]:
    """Put what forecasts say under some names into columns."""
    return {name: np.array([_said(one, FORETOLD[name]) for one in forecasts], np.float64) for name in names}


def _said(forecast: Forecast | None, told: Callable[[Forecast], float | None]) -> float:
    value = None if forecast is None else told(forecast)
    return math.nan if value is None else value
