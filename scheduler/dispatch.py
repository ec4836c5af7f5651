"""One request's candidates: what was heard of each, who is first, and who would still do if all others fail."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from predictor.forecast import Forecast
from scheduler.decision import Decision, decide
from scheduler.instances import InstanceView
from scheduler.policies import Policy


class Fate(Enum):
    """What became of a candidate."""

    UNASKED = "unasked"  # its policy looks at no state
    FORECAST = "forecast"  # compared by its forecast
    LAST_INDICATORS = "last_indicators"  # nobody had a forecast: compared by what was known of it
    REFUSED = "refused"  # it could never serve the request
    LATE = "late"
    DOWN = "down"
    EXCLUDED = "excluded"  # the caller did not want it
    INVALID = "invalid"  # its answer made no sense
    DRAINING = "draining"  # it finishes what it has
    STOPPED = "stopped"  # its engine does not run


COMPARED = frozenset({Fate.UNASKED, Fate.FORECAST})

# Nobody knows how these stand, but their engines may well work: those with the better chances first.
LAST_RESORTS = {Fate.LATE: 0, Fate.LAST_INDICATORS: 0, Fate.INVALID: 1, Fate.DOWN: 1, Fate.DRAINING: 2}


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One instance in one decision.

    `version` counts the promises that its forecast knows of, `promised` those that are known to have been made since.
    `indicators` are the last ones known, so old; `unseen` counts requests that were sent there since without a promise.
    """

    instance_id: str
    fate: Fate = Fate.UNASKED
    forecast: Forecast | None = None
    version: int = 0
    epoch: int = 0
    promised: int = 0
    indicators: Mapping[str, float] = field(default_factory=dict)
    age_s: float = 0.0
    unseen: int = 0
    engine_failed: bool = False  # lately, say those who sent requests there
    score: float | None = None
    note: str = ""
    answered_s: float = 0.0

    @property
    def is_compared(self) -> bool:
        """Tell whether a policy compares it with others."""
        return self.fate in COMPARED and not self.engine_failed

    def view(self) -> InstanceView:
        """What a policy sees of it."""
        forecast = self.forecast
        if forecast is not None and self.promised:
            forecast = behind(forecast, self.promised)
        return InstanceView(
            instance_id=self.instance_id, forecast=forecast, indicators=self.indicators, age_s=self.age_s
        )


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


def order(candidates: Sequence[Candidate], policy: Policy) -> Decision | None:
    """Rank everybody who might serve the request; None where nobody might.

    First those that the policy could compare and that would ever finish; then those of whom no forecast could be had;
    last those that, as things stand, would never finish.
    """
    compared = [candidate for candidate in candidates if candidate.is_compared]
    scores: Mapping[str, float] = {}
    ranking: tuple[str, ...] = ()
    if compared:
        decision = decide([candidate.view() for candidate in compared], policy)
        scores, ranking = decision.scores, decision.ranking
        for candidate in compared:
            candidate.score = scores[candidate.instance_id]
    rest = last_resorts([candidate for candidate in candidates if candidate.instance_id not in scores])
    if not ranking and not rest:
        return None
    never = tuple(name for name in ranking if scores[name] == math.inf)
    return Decision(
        ranking=(*ranking[: len(ranking) - len(never)], *rest, *never),
        scores=scores,
        skipped={candidate.instance_id: candidate.note for candidate in candidates if not candidate.is_compared},
    )


def last_resorts(candidates: Sequence[Candidate]) -> list[str]:
    """Rank those of whom nobody knows how they stand: most likely to work, least busy when last heard of."""
    able = [candidate for candidate in candidates if candidate.fate in LAST_RESORTS or candidate.fate in COMPARED]
    return [candidate.instance_id for candidate in sorted(able, key=_hope)]


def _hope(candidate: Candidate) -> tuple[bool, int, bool, float, str]:
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
