"""One attempt to choose an instance: those that are compared, the best of them, and those that are set aside."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.forecast_result import Forecast
from predictor.request import SERVE
from scheduler.candidate import (
    FORECAST_FIELDS,
    Candidate,
    CandidateStatus,
    delayed,
    fallback_key,
    forecast_columns,
    with_delays_of,
)
from scheduler.candidates import Candidates, RequestIndicators, Rows
from scheduler.columns import Column
from scheduler.indicators import INDICATORS, IndicatorSource, roots_of
from scheduler.instances import InstanceDirectory
from scheduler.intentions import FORECAST_IN, NO_ANSWER, STATUS_OF, Answer, Ask, Reserve
from scheduler.policy import Policy
from scheduler.sessions import SESSION_HERE

NONE = -1  # no position
HITS = "prefix_hit_tokens"  # estimated, until a forecast knows them
BY_FORECAST = (IndicatorSource.FORECAST, IndicatorSource.PREFIX)
TARGETS = ("ttft_left_s", "tpot_slo_s", "late", "tier_closed")
# indicators that change with forecasts, and with a request's targets
OF_FORECASTS = {name for name in INDICATORS if any(one.source in BY_FORECAST for one in roots_of([name]))} - {HITS}
OF_TARGETS = {name for name in INDICATORS if any(one.name in TARGETS for one in roots_of([name]))}
NO_CANDIDATES: dict[str, Candidate] = {}  # never written to
EMPTY: Mapping[str, Any] = MappingProxyType({})

Kept = tuple[Mapping[str, float], float, float, int]  # indicators of an instance, their age, its time, `num_unseen`


class Comparison:
    """What one attempt of a decision has found; the next attempt starts with a new comparison.

    A policy shortlists candidates and scores those that have what it reads. All other instances are set aside, each
    with its reason; one of them is chosen where no candidate is left. Positions are those among the compared.
    """

    # Most decisions need little of it.
    shortlisted: Candidates | None = None  # by the policy
    compared: Candidates | None = None  # of these, what it compares
    forecasts: list[Answer] | None = None  # of the compared; None where a driver gave columns
    since: list[int] | None = None  # reservations made after each forecast
    scores: Column | None = None
    admits: npt.NDArray[np.bool_] | None = None
    others: dict[str, Candidate] = NO_CANDIDATES  # what is not compared, or failed
    chosen: Candidate | int = NONE
    answers: Mapping[str, Answer] = EMPTY
    chosen_columns: Mapping[str, Column] = EMPTY  # the forecast of an instance that was chosen without one
    leg = SERVE  # that instances are asked about
    in_s = 0.0  # until it arrives
    is_background = False  # the request must leave the deadlines of others alone, and has none to miss itself
    _order: list[int] | None = None  # best first

    # What only an explanation reads (`scheduler/explanation.py`).
    reads: Mapping[str, Column] = EMPTY
    kept: Mapping[str, Kept] = EMPTY
    kept_s = 0.0  # when these were kept

    def __init__(self, policy: Policy, instances: InstanceDirectory) -> None:
        """Start without a candidate."""
        self.policy = policy
        self.instances = instances

    # Forecasts and scores.

    def take(self, asked: Ask, answers: Mapping[str, Answer], now_s: float) -> None:
        """Compare the asked instances that answered with a forecast, and set the others aside."""
        candidates = asked.candidates
        self.answers = answers
        try:
            compared = list(map(answers.__getitem__, candidates.instance_ids))
        except KeyError:
            compared = [answers.get(name, NO_ANSWER) for name in candidates.instance_ids]
        for name in asked.others:
            self._answer_of_other(self.others[name], answers.get(name, NO_ANSWER))
        if list(map(STATUS_OF, compared)).count(CandidateStatus.FORECAST) < len(compared):
            for position, answer in enumerate(compared):
                if answer.status is not CandidateStatus.FORECAST:
                    self.set_aside(candidates.instance_id(position), answer, now_s)
            kept = [position for position, one in enumerate(compared) if one.status is CandidateStatus.FORECAST]
            candidates, compared = candidates.only(np.array(kept, np.intp)), [compared[position] for position in kept]
        self.compared, self.forecasts = candidates, compared

    def take_columns(self, candidates: Candidates, columns: Mapping[str, Column]) -> None:
        """Compare candidates by the columns of their forecasts."""
        _add_forecasts(candidates, columns)
        self.compared = candidates
        self.score()

    def take_conflict(self, answer: Answer) -> None:
        """Replace the forecast of the chosen instance, as other reservations were made there; score again."""
        chosen = self.chosen
        assert answer.forecast is not None
        if isinstance(chosen, Candidate):
            chosen.version, chosen.epoch = answer.version, answer.epoch
            chosen.num_reserved_since = self._reserved_since(chosen)
            chosen.forecast = with_delays_of(chosen.forecast, answer.forecast)
        else:
            assert self.forecasts is not None
            before = self.forecasts[chosen].forecast
            self.forecasts[chosen] = answer._replace(forecast=with_delays_of(before, answer.forecast))
        if self.forecasts is not None:
            self.rank_forecasts()

    def rank_forecasts(self) -> None:
        """Score by forecasts, corrected for the reservations that were made since; again after every conflict."""
        compared, answers, policy = self.compared, self.forecasts, self.policy
        assert compared is not None
        assert answers is not None
        if not answers:
            return
        self.since = self.instances.reserved_since(compared, answers)
        if self.scores is not None or policy.needs_prefix:  # what was derived from earlier forecasts is outdated
            compared = self.compared = replace(
                compared,
                columns={name: column for name, column in compared.columns.items() if name not in OF_FORECASTS},
            )
        _add_forecasts(compared, forecast_columns(self.corrected(), policy.forecast_columns))
        self.complete(compared)
        self.score()

    def rank_again(self) -> None:
        """Score again, if reservations were made since the last time."""
        compared, answers = self.compared, self.forecasts
        if answers and compared is not None and self.instances.reserved_since(compared, answers) != self.since:
            self.rank_forecasts()

    def complete(self, compared: Candidates) -> None:
        """Add to the columns of forecasts what these do not know."""

    def corrected(self) -> list[Forecast | None]:
        """Return the forecasts of the compared, corrected for the reservations that were made since."""
        answers, since = self.forecasts or [], self.since or []
        if not any(since):
            return list(map(FORECAST_IN, answers))
        return [
            answer.forecast if not num or answer.forecast is None else delayed(answer.forecast, num)
            for answer, num in zip(answers, since, strict=True)
        ]

    def score(self) -> None:
        """Have the policy score the compared, and say which of them admit the request."""
        compared, policy = self.compared, self.policy
        assert compared is not None
        self._order = None
        self.scores = policy.scores(compared)
        if policy.holds:
            self.admits = policy.admits(compared, background=self.is_background)

    def forget_targets(self, request: RequestIndicators) -> None:
        """Compare from the next scores on as for a request without targets."""
        if self.compared is not None:
            self.compared.request = request
            for name in OF_TARGETS:
                self.compared.columns.pop(name, None)

    # The best of the compared.

    def best(self) -> int:
        """Return the best position: those that admit the request first, then those that would ever finish it."""
        compared, scores = self.compared, self.scores
        if compared is None or scores is None:
            return NONE
        if self._order is None and not self.others and SESSION_HERE not in compared.columns:
            best = self.policy.best(compared, scores)
            if (self.admits is None or self.admits[best]) and not self.never_finishes(best):
                return best  # the first of the order, found faster
        return next(self.positions(), NONE)

    def positions(self) -> Iterator[int]:
        """Yield positions that have not failed, best first."""
        order = self._order
        compared, scores = self.compared, self.scores
        if compared is None or scores is None:
            return
        if order is None:
            order = self._order = self.ordered(compared, scores)
        others = self.others
        for position in order:
            if not others or compared.instance_id(position) not in others:
                yield position

    def ordered(self, compared: Candidates, scores: Column) -> list[int]:
        """Return all positions, best first."""
        order = self.policy.order(compared, scores)
        if self.admits is not None:
            order = order[(~self.admits[order]).argsort(kind="stable")]
        e2e_s = compared.columns.get("predicted_e2e_s")
        if e2e_s is not None and (e2e_s == math.inf).any():
            order = order[(e2e_s[order] == math.inf).argsort(kind="stable")]
        ordered: list[int] = self.policy.with_session_first(compared, order, self.admits).tolist()
        return ordered

    def never_finishes(self, position: int) -> bool:
        """Whether, by its forecast, the request would never finish there."""
        if not self.policy.needs_forecast:
            return False
        assert self.compared is not None
        e2e_s = self.compared.columns.get("predicted_e2e_s")
        return e2e_s is not None and e2e_s.item(position) == math.inf

    def refused(self, admits: npt.NDArray[np.bool_], _rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of the compared do not admit the request."""
        return ~admits

    # Instances that no policy compared.

    def set_aside(self, instance_id: str, answer: Answer, now_s: float) -> None:
        """Record that an instance cannot be compared, and why."""
        status = self.instances.by_id.get(instance_id)
        if status is None:
            self.add_other(Candidate(instance_id=instance_id, status=answer.status, note=answer.note))
            return
        candidate = status.candidate(answer.status, answer.note, now_s)
        candidate.answered_s = answer.answered_s
        candidate.forecast, candidate.version, candidate.epoch = answer.forecast, answer.version, answer.epoch
        self.add_other(candidate)

    def add_other(self, candidate: Candidate) -> None:
        """Set a candidate aside."""
        if self.others is NO_CANDIDATES:
            self.others = {}
        self.others[candidate.instance_id] = candidate

    def _answer_of_other(self, candidate: Candidate, answer: Answer) -> None:
        candidate.status, candidate.forecast = answer.status, answer.forecast
        candidate.version, candidate.epoch, candidate.answered_s = answer.version, answer.epoch, answer.answered_s
        candidate.note = answer.note or candidate.note
        status = self.instances.by_id.get(candidate.instance_id)
        if status is not None:
            candidate.num_reserved_since = status.versions.since(answer.version, answer.epoch)
            candidate.indicators, candidate.num_unseen = status.indicators, status.num_unseen

    def _reserved_since(self, candidate: Candidate) -> int:
        status = self.instances.by_id.get(candidate.instance_id)
        return 0 if status is None else status.versions.since(candidate.version, candidate.epoch)

    def fallbacks(self, now_s: float, *, with_left_out: bool = True) -> list[Candidate]:
        """Return the instances that no policy compared but that may work, the most likely one first."""
        by_id = self.instances.by_id
        candidates = dict(self.others)
        if self.shortlisted is not None and with_left_out:
            for name, note in self.shortlisted.left_out():
                if name in by_id and name not in candidates:
                    candidates[name] = by_id[name].candidate(CandidateStatus.NOT_SHORTLISTED, note, now_s)
        return sorted((one for one in candidates.values() if one.may_be_fallback), key=fallback_key)

    def best_fallback(self, now_s: float) -> Candidate | None:
        """Return the instance that most likely works, of those that no policy compared."""
        fallbacks = self.fallbacks(now_s)
        if not fallbacks:
            return None
        if fallbacks[0].instance_id not in self.others:
            self.add_other(fallbacks[0])
        return fallbacks[0]

    # The chosen instance.

    @property
    def position(self) -> int:
        """The position of the chosen instance among the compared; -1 where the policy did not compare it."""
        return self.chosen if isinstance(self.chosen, int) else NONE

    @property
    def chosen_id(self) -> str:
        """The id of the chosen instance."""
        chosen = self.chosen
        if isinstance(chosen, Candidate):
            return chosen.instance_id
        assert self.compared is not None
        return self.compared.instance_id(chosen)

    @property
    def is_admitted(self) -> bool:
        """Whether the chosen instance admits the request by the policy's condition."""
        if isinstance(self.chosen, Candidate):
            return self.chosen.admits
        return self.admits is None or bool(self.admits[self.chosen])

    def leg_at(self, _position: int) -> tuple[str, float]:
        """Return the leg of the instance at a position, and when it arrives there; -1 for one that is not compared."""
        return self.leg, self.in_s

    def reservation(self, *, conditional: bool) -> Reserve:
        """Return the intention to reserve at the chosen instance; a `conditional` one fails if others came first."""
        chosen, compared = self.chosen, self.compared
        if_version = if_epoch = forecast = None
        if isinstance(chosen, Candidate):
            instance_id = chosen.instance_id
            if chosen.forecast is not None and conditional:
                if_version, if_epoch = chosen.version + chosen.num_reserved_since, chosen.epoch
            row = self.instances.table.row_of.get(instance_id, NONE)
            return Reserve(instance_id, row, if_version, if_epoch, None, *self.leg_at(NONE))
        assert compared is not None
        row = compared.row(chosen)
        instance_id = compared.known.instance_ids[row]
        if self.forecasts is not None:
            answer, since = self.forecasts[chosen], (self.since or [])[chosen]
            forecast = self.corrected()[chosen] if since else answer.forecast
            if self.policy.keeps_deadlines:
                since = 0  # reservations made since may miss their deadlines: the instance has to look again
            if conditional:
                if_version, if_epoch = answer.version + since, answer.epoch
        elif self.answers:
            forecast = self.answers[instance_id].forecast
        return Reserve(instance_id, row, if_version, if_epoch, forecast, *self.leg_at(chosen))

    @property
    def chosen_forecast(self) -> Forecast | None:
        """The forecast of the chosen instance, if there is one."""
        chosen = self.chosen
        if isinstance(chosen, Candidate):
            return chosen.predicted if chosen.is_compared else None
        if self.forecasts is not None:
            return self.corrected()[chosen]
        answer = self.answers.get(self.chosen_id)
        return None if answer is None else answer.forecast

    def predicted(self, name: str) -> float | None:
        """Return a field of the chosen instance's forecast by its indicator's name, if it is known."""
        chosen, columns = self.chosen, self.chosen_columns
        if name in columns:
            return columns[name].item(0)
        if isinstance(chosen, int) and self.policy.needs_forecast and self.compared is not None:
            column = self.compared.columns.get(name)
            if column is not None:
                return column.item(chosen)
        forecast = self.chosen_forecast
        return None if forecast is None else FORECAST_FIELDS[name](forecast)


def rows_of(candidates: Candidates) -> Rows:
    """Return the rows of candidates among all instances."""
    return np.arange(len(candidates)) if candidates.rows is None else candidates.rows


def _add_forecasts(candidates: Candidates, columns: Mapping[str, Column]) -> None:
    """Add the columns of forecasts; where these do not know what an engine has cached, the estimate remains."""
    estimated = candidates.columns.get(HITS)
    candidates.add(columns)
    if estimated is not None and HITS in columns:
        candidates.columns[HITS] = np.where(np.isnan(columns[HITS]), estimated, columns[HITS])
