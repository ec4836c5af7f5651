"""A placement explained in one line."""

from __future__ import annotations

from predictor.forecast_result import Forecast
from scheduler.candidate import Candidate
from scheduler.placement import DecisionBasis, Placement

MAX_NAMED = 4  # instances that could not be compared


def why(placement: Placement, num_candidates: int) -> str:
    """Return one line that explains a placement."""
    decision, forecast = placement.decision, placement.forecast
    skipped = decision.skipped()
    num = num_candidates - len(skipped)
    if placement.basis is DecisionBasis.LAST_RESORT:
        line = f"no instance could be compared: {decision.chosen.note or 'no forecast'}"
    elif forecast is not None:
        forecasts = decision.forecasts()
        few = f", {len(forecasts)} of them forecast" if 0 < len(forecasts) < num else ""
        line = f"{placement.policy} over {num}{few}: {_times(forecast)}{_runner_up(placement)}"
        if placement.num_conflicts:
            line += f", after {placement.num_conflicts} conflicts"
    else:
        line = f"{placement.policy} over {num}"
    if placement.disaggregation:
        line += f"; {_legs(placement)}"
    if placement.held_s > 0:
        admitted = "" if decision.is_admitted else ", not admitted by any instance"
        line += f"; held {placement.held_s:.3f} s{admitted}"
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
    forecast = dict(placement.decision.forecasts()).get(others[0])
    return "" if forecast is None else f"; next {others[0]}: e2e {forecast.e2e_s:.3f} s"


def _without(skipped: list[Candidate]) -> str:
    if not skipped:
        return ""
    named = "; ".join(f"{one.instance_id}: {one.note}" for one in skipped[:MAX_NAMED])
    more = f"; and {len(skipped) - MAX_NAMED} more" if len(skipped) > MAX_NAMED else ""
    return f"; without {named}{more}"
