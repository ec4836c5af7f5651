"""How a placement came about: the instances that its decision considered, and one line that says why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from predictor.forecast_result import Forecast
from scheduler.admission.late_work import DEFERRED
from scheduler.candidate import Candidate, CandidateStatus
from scheduler.columns import Column
from scheduler.comparison import NO_CANDIDATES, Comparison
from scheduler.instances import LATE, NoInstanceError, age_of
from scheduler.placement import DecisionBasis, Placement

BASIS_OF = {
    CandidateStatus.NOT_QUERIED: DecisionBasis.BLIND,
    CandidateStatus.INDICATORS: DecisionBasis.INDICATORS,
    CandidateStatus.FORECAST: DecisionBasis.FORECAST,
}
WHY_DROPPED = {
    LATE: "late, as no instance keeps its deadlines",
    DEFERRED: "deferred, as it takes long and others would be late",
}
MAX_NAMED = 4  # instances that could not be compared
MAX_REFUSED = 8  # instances that are named where none is left
MAX_EXPLAINED = 64  # instances compared by indicators whose other indicators are kept


class Explanation:
    """What a comparison found, as things were at that time; where a request may have two legs, for both of them.

    `prefill` explains the prefill leg, and `given_up` are the instances that attempts with other legs considered.
    """

    def __init__(
        self,
        comparison: Comparison,
        prefill: Explanation | None = None,
        given_up: Mapping[str, Candidate] = NO_CANDIDATES,
    ) -> None:
        """Explain a comparison."""
        self._comparison = comparison
        self._prefill = prefill
        self._given_up = given_up

    @property
    def chosen(self) -> Candidate:
        """The chosen instance as the decision saw it."""
        chosen = self._comparison.chosen
        return chosen if isinstance(chosen, Candidate) else candidate_at(self._comparison, chosen)

    @property
    def basis(self) -> DecisionBasis:
        """The information that the decision is based on."""
        chosen = self._comparison.chosen
        if isinstance(chosen, Candidate):
            return BASIS_OF[chosen.status] if chosen.is_compared else DecisionBasis.LAST_RESORT
        return BASIS_OF[_status_of_compared(self._comparison)]

    def ranking(self) -> list[str]:
        """Return all instances that may serve the request, best first."""
        comparison, compared = self._comparison, self._comparison.compared
        positions = [] if compared is None else list(comparison.positions())
        able = [one for one in positions if not comparison.never_finishes(one)]
        names = [] if compared is None else [compared.instance_id(one) for one in able]
        fallback = [one.instance_id for one in comparison.fallbacks(0.0, with_left_out=not names)]
        never = [] if compared is None else [compared.instance_id(one) for one in positions[len(able) :]]
        return list(dict.fromkeys([*names, *fallback, *never]))

    def skipped(self) -> list[Candidate]:
        """Return the instances that could not be compared, each with the reason."""
        others = self._comparison.others.values()
        skipped = [one for one in others if not one.is_compared and one.status is not CandidateStatus.NOT_SHORTLISTED]
        if self._prefill is not None:
            skipped += self._prefill.skipped()
        if self._given_up:
            named = {one.instance_id for one in self._considered()}
            failed = (one for name, one in self._given_up.items() if name not in named)
            skipped += (one for one in failed if one.status is not CandidateStatus.NOT_SHORTLISTED)
        return skipped

    def candidates(self) -> list[Candidate]:
        """Return all instances as the decision saw them, by id; those asked about the prefill leg with that."""
        found = {one.instance_id: one for one in [*self._given_up.values(), *self._considered()]}
        return sorted(found.values(), key=lambda one: one.instance_id)

    def forecasts(self) -> list[tuple[str, Forecast]]:
        """Return the forecasts of all compared instances, corrected for the reservations made since.

        Of an instance that was asked about two legs it is the forecast that ends earlier.
        """
        compared = self._comparison.compared
        if compared is None or self._comparison.forecasts is None:
            return []
        best: dict[str, Forecast] = {}
        for name, forecast in zip(compared.instance_ids, self._comparison.corrected(), strict=True):
            if forecast is None or name in self._comparison.others:
                continue
            if name not in best or forecast.e2e_s < best[name].e2e_s:
                best[name] = forecast
        return list(best.items())

    def refusal(self) -> Exception:
        """Return why no instance can take the request: because of the request itself, or of the instances."""
        candidates = self.candidates()
        refused = [one for one in candidates if one.status is CandidateStatus.REFUSED]
        final = (CandidateStatus.REFUSED, CandidateStatus.EXCLUDED)
        if refused and all(one.status in final for one in candidates):
            return ValueError(f"request.{refused[0].note.removeprefix('when reserving: ')}")
        return NoInstanceError(f"no instance can take the request: {notes_of(candidates)}")

    def _considered(self) -> list[Candidate]:
        """Return the instances of the last attempt."""
        comparison, found = self._comparison, dict[str, Candidate]()
        for position in comparison.positions():
            candidate = candidate_at(comparison, position)
            found.setdefault(candidate.instance_id, candidate)
        for name, candidate in comparison.others.items():
            found.setdefault(name, candidate)
        by_id, shortlisted = comparison.instances.by_id, comparison.shortlisted
        for name, note in () if shortlisted is None else shortlisted.left_out():
            if name in found:
                continue
            if name in by_id:
                now_s = 0.0 if shortlisted is None else shortlisted.now_s
                found[name] = by_id[name].candidate(CandidateStatus.NOT_SHORTLISTED, note, now_s)
            else:
                found[name] = Candidate(instance_id=name, status=CandidateStatus.NOT_SHORTLISTED, note=note)
        return [*found.values(), *([] if self._prefill is None else self._prefill.candidates())]


def _status_of_compared(comparison: Comparison) -> CandidateStatus:
    if comparison.policy.needs_forecast:
        return CandidateStatus.FORECAST
    return CandidateStatus.NOT_QUERIED if comparison.policy.reads_no_indicators else CandidateStatus.INDICATORS


def notes_of(candidates: Sequence[Candidate]) -> str:
    """Return why the first of some instances cannot take a request."""
    return "; ".join(f"{one.instance_id}: {one.note}" for one in candidates[:MAX_REFUSED])


def candidate_at(comparison: Comparison, position: int) -> Candidate:
    """Return what is known of the compared instance at a position."""
    compared = comparison.compared
    assert compared is not None
    name = compared.instance_id(position)
    candidate = Candidate(instance_id=name, status=_status_of_compared(comparison))
    if name in comparison.kept:
        candidate.indicators, age_s, reported_s, candidate.num_unseen = comparison.kept[name]
        candidate.age_s = age_of(candidate.indicators, age_s, reported_s, comparison.kept_s)
    if comparison.scores is not None:
        candidate.score = float(comparison.scores[position])
    if comparison.admits is not None:
        candidate.admits = bool(comparison.admits[position])
    if comparison.forecasts is not None:
        answer = comparison.forecasts[position]
        candidate.forecast, candidate.version, candidate.epoch = answer.forecast, answer.version, answer.epoch
        candidate.num_reserved_since = (comparison.since or [])[position]
        candidate.answered_s = answer.answered_s
    elif name in comparison.answers:
        answer = comparison.answers[name]
        candidate.forecast, candidate.answered_s = answer.forecast, answer.answered_s
    candidate.read = {read: float(column[position]) for read, column in comparison.reads.items()}
    candidate.age_s = candidate.read.pop("age_s", candidate.age_s)
    return candidate


# What a decision keeps for its explanation.


def keep_indicators(comparison: Comparison, names: Sequence[str], now_s: float) -> None:
    """Keep the last known indicators of some instances; each report replaces them by another object."""
    by_id = comparison.instances.by_id
    comparison.kept_s = now_s
    comparison.kept = {
        name: (one.indicators, one.age_s, one.reported_s, one.num_unseen)
        for name in names
        if (one := by_id.get(name)) is not None
    }


def keep_what_was_read(comparison: Comparison) -> None:
    """Copy the indicators that the policy read, as the table is updated in place; keep the others of the best."""
    compared, policy = comparison.compared, comparison.policy
    assert compared is not None
    reads = {name: _own(compared[name]) for name in policy.needs}
    compared.add(reads)  # a tie-break may be read again
    scores = comparison.scores
    if scores is not None:
        scores = comparison.scores = _own(scores)
    age_s = compared["age_s"]
    comparison.reads = {**reads, "age_s": np.where(age_s < math.inf, age_s, 0.0)} if reads else {}
    names = compared.instance_ids
    if scores is not None and len(names) > MAX_EXPLAINED:
        best = policy.order(compared, scores)[:MAX_EXPLAINED].tolist()
        names = tuple(names[position] for position in best)
    keep_indicators(comparison, names, compared.now_s)


def _own(column: Column) -> Column:
    """Return a column that is no view of the table."""
    return column if column.base is None else column.copy()


# One line.


def why(placement: Placement, num_candidates: int) -> str:
    """Return one line that explains a placement."""
    explanation, forecast = placement.decision.explanation, placement.forecast
    skipped = explanation.skipped()
    num = num_candidates - len(skipped)
    if placement.basis is DecisionBasis.LAST_RESORT:
        line = f"no instance could be compared: {explanation.chosen.note or 'no forecast'}"
    elif forecast is not None:
        forecasts = explanation.forecasts()
        few = f", {len(forecasts)} of them forecast" if 0 < len(forecasts) < num else ""
        line = f"{placement.policy} over {num}{few}: {_times(forecast)}{_runner_up(placement)}"
        if placement.num_conflicts:
            line += f", after {placement.num_conflicts} conflicts"
    else:
        line = f"{placement.policy} over {num}"
    if placement.disaggregation:
        line += f"; {_legs(placement)}"
    if placement.held_s > 0:
        admitted = "" if placement.decision.is_admitted else ", not admitted by any instance"
        line += f"; held {placement.held_s:.3f} s{admitted}"
    decision = placement.decision
    if decision.deadlines_dropped and not decision.request.objective.is_best_effort:
        line += f"; {WHY_DROPPED[decision.deadlines_dropped]}"
    return line + _without(skipped)


def _times(forecast: Forecast) -> str:
    return f"e2e {forecast.e2e_s:.3f} s, ttft {forecast.ttft_s:.3f} s"


def _legs(placement: Placement) -> str:
    """Return why the request has two legs, or not, and how long the prefill leg takes."""
    prefill = placement.prefill
    if prefill is None:
        return placement.disaggregation
    ends = "" if prefill.forecast is None else f", ends in {prefill.forecast.e2e_s:.3f} s"
    return f"{placement.disaggregation}: prefill on {prefill.instance_id}{ends}"


def _runner_up(placement: Placement) -> str:
    others = placement.next_best
    if not others:
        return ""
    forecast = dict(placement.decision.explanation.forecasts()).get(others[0])
    return "" if forecast is None else f"; next {others[0]}: e2e {forecast.e2e_s:.3f} s"


def _without(skipped: list[Candidate]) -> str:
    if not skipped:
        return ""
    named = "; ".join(f"{one.instance_id}: {one.note}" for one in skipped[:MAX_NAMED])
    more = f"; and {len(skipped) - MAX_NAMED} more" if len(skipped) > MAX_NAMED else ""
    return f"; without {named}{more}"
