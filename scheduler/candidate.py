"""One instance in one decision: what it answered, and whether it may still serve the request if others fail."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np

from predictor.forecast_result import Forecast
from scheduler.columns import Column


class CandidateStatus(Enum):
    """What a decision knows of an instance: how it was compared, or why it was not."""

    NOT_QUERIED = "not_queried"  # the policy reads no state
    FORECAST = "forecast"  # compared by its forecast
    INDICATORS = "indicators"  # compared by its last known indicators
    LAST_INDICATORS = "last_indicators"  # no instance had a forecast: compared by its last known indicators
    NOT_SHORTLISTED = "not_shortlisted"  # a filter, a sample or a shortlist left it out
    REFUSED = "refused"  # it can never serve the request
    LATE = "late"  # no answer before the deadline
    DOWN = "down"  # its sidecar cannot be reached
    EXCLUDED = "excluded"  # the caller excluded it
    INVALID = "invalid"  # its answer was malformed
    DRAINING = "draining"  # it finishes its requests and takes no new ones
    STOPPED = "stopped"  # its engine does not run


COMPARED_STATUSES = frozenset({CandidateStatus.NOT_QUERIED, CandidateStatus.FORECAST, CandidateStatus.INDICATORS})

# Instances that no policy compared, but whose engines may well work: a lower number is tried first.
FALLBACK_ORDER = {
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

    `version` is the number of reservations that its forecast includes, `num_reserved_since` counts later ones.
    `indicators` are the last known ones; `num_unseen` counts requests sent since without a reservation. `read` holds
    the indicators that the policy read, where it decided without forecasts. `admits` says whether the request may go
    there now, for policies that hold requests.
    """

    instance_id: str
    status: CandidateStatus = CandidateStatus.NOT_QUERIED
    forecast: Forecast | None = None
    version: int = 0
    epoch: int = 0
    num_reserved_since: int = 0
    indicators: Mapping[str, float] = field(default_factory=dict)
    age_s: float = 0.0
    read: Mapping[str, float] = field(default_factory=dict)
    num_unseen: int = 0
    engine_failed: bool = False  # requests that were sent there failed recently
    score: float | None = None
    admits: bool = True
    note: str = ""
    answered_s: float = 0.0

    @property
    def is_compared(self) -> bool:
        """Whether the policy compares it with others."""
        return self.status in COMPARED_STATUSES and not self.engine_failed

    @property
    def predicted(self) -> Forecast | None:
        """Its forecast, corrected for reservations made since."""
        if self.forecast is not None and self.num_reserved_since:
            return delayed(self.forecast, self.num_reserved_since)
        return self.forecast

    @property
    def may_be_fallback(self) -> bool:
        """Whether the request may go there when no compared instance is left."""
        return self.status in FALLBACK_ORDER or self.status in COMPARED_STATUSES


def fallback_key(candidate: Candidate) -> tuple[bool, int, bool, float, str]:
    """Order instances that were not compared: the most likely to work first, then the least busy one."""
    load = candidate.num_unseen + sum(
        candidate.indicators.get(name, 0.0) for name in ("num_running", "num_waiting", "num_reserved")
    )
    return (
        candidate.engine_failed,
        FALLBACK_ORDER.get(candidate.status, 0),
        not candidate.indicators,
        load,
        candidate.instance_id,
    )


def delay_of_reservation_s(ttft_s: float, queue_s: float, e2e_s: float) -> float:
    """Estimate how long one later reservation delays a request: its prefill, at least a hundredth of its time.

    This suffices to tell equal instances apart until the next forecast, which includes the reservation.
    """
    return max(ttft_s - queue_s, e2e_s / 100)


def delayed(forecast: Forecast, num_reservations: int) -> Forecast:
    """Correct a forecast for reservations that were made at the instance after it."""
    if forecast.e2e_s == math.inf:
        return forecast
    delay_s = num_reservations * delay_of_reservation_s(forecast.ttft_s, forecast.queue_s, forecast.e2e_s)
    return replace(
        forecast,
        queue_s=forecast.queue_s + delay_s,
        ttft_s=forecast.ttft_s + delay_s,
        e2e_s=forecast.e2e_s + delay_s,
    )


def with_delays_of(before: Forecast | None, forecast: Forecast) -> Forecast:
    """Complete a forecast that came with a conflict, for which no delays were asked, by those of the one before."""
    if before is None or forecast.delay_sum_s is not None:
        return forecast
    return replace(
        forecast,
        delay_sum_s=before.delay_sum_s,
        delay_worst_s=before.delay_worst_s,
        others_preempted=before.others_preempted,
        others_missed=before.others_missed,
        gain_before=before.gain_before,
        gain_after=before.gain_after,
        least_slack_s=before.least_slack_s,
    )


FORECAST_FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "predicted_ttft_s": attrgetter("ttft_s"),
    "predicted_e2e_s": attrgetter("e2e_s"),
    "predicted_tpot_s": attrgetter("tpot_s"),
    "predicted_queue_s": attrgetter("queue_s"),
    "predicted_preemptions": attrgetter("num_preemptions"),
    "others_preempted": attrgetter("others_preempted"),
    "delay_sum_s": attrgetter("delay_sum_s"),
    "delay_worst_s": attrgetter("delay_worst_s"),
    "prefix_hit_tokens": attrgetter("prefix_hit_tokens"),
    "predicted_attained": attrgetter("attained"),
    "others_missed": lambda one: one.others_missed or 0,  # 0 also where a sidecar does not say
    "gain_before": attrgetter("gain_before"),
    "gain_after": attrgetter("gain_after"),
    "least_slack_s": attrgetter("least_slack_s"),
    "offloaded_hit_tokens": attrgetter("offloaded_hit_tokens"),
    "predicted_unmeasured": attrgetter("unmeasured"),
}
UNKNOWN = SimpleNamespace(**dict.fromkeys((one.name for one in fields(Forecast)), None))


def forecast_columns(forecasts: Sequence[Forecast | None], names: Collection[str]) -> dict[str, Column]:
    """Return the named fields of forecasts as columns; NaN where a field is unknown."""
    try:
        return {
            name: np.array(list(map(FORECAST_FIELDS[name], forecasts)), np.float64) for name in names
        }  # None is NaN
    except AttributeError:
        known: list[Any] = [UNKNOWN if one is None else one for one in forecasts]
        return forecast_columns(known, names)
