"""Metrics of a run: latencies, their percentiles, SLO attainment, and one row per request."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.gain import EQUAL_WEIGHTS, GainWeights, ServedRequests, default_levels
from predictor.request import CLASSES
from predictor.tabulated_costs import Costs, step_seconds, tabulate
from simulator.field_checks import require_number
from simulator.fleet import has_roles, instance_names
from simulator.pool_metrics import pool_summary
from simulator.result import STATUSES, RunResult
from simulator.service_report import service_report

Floats = npt.NDArray[np.float64]

PERCENTILES = (50, 90, 99)
WINDOW_S = 10.0  # of the prefill imbalance (LMetric §4.4, figure 10)
CDF_POINTS = 101


@dataclass(frozen=True, slots=True, kw_only=True)
class SloTarget:
    """Limits of a request's latencies; None for no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        for spec in fields(self):
            if (limit_s := getattr(self, spec.name)) is not None:
                require_number(f"slo.{spec.name}", limit_s, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """The latencies of all requests, in the order of arrival; NaN if a token never came or the latency is undefined."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats


def latencies(result: RunResult) -> Latencies:
    """Return latencies from the arrival at the cluster, so with decision and network."""
    outcomes, arrival_s = result.outcomes, result.work.arrival_s
    finished = result.decisions.status == STATUSES.index("finished")
    first = np.where(outcomes.first_token_s >= 0, outcomes.first_token_s, np.nan)
    last = np.where(finished, outcomes.finished_s, np.nan)
    rest = np.maximum(outcomes.produced_tokens - 1, 1)
    return Latencies(
        ttft_s=first - arrival_s,
        tpot_s=np.where(outcomes.produced_tokens > 1, (last - first) / rest, np.nan),
        e2e_s=last - arrival_s,
    )


def p99_ttft_s(result: RunResult) -> float:
    """Return P99 TTFT, the paper's criterion of capacity; infinite if over 1 % of the requests never got a token."""
    return percentile_of_all(latencies(result).ttft_s, 99)


def percentile_of_all(values: Floats, percentile: float) -> float:
    """Return a percentile, with missing values as infinite."""
    return float(np.percentile(np.where(np.isnan(values), np.inf, values), percentile, method="higher"))


def summary(
    result: RunResult, slo: SloTarget | None = None, skip_s: float = 0.0, weights: GainWeights = EQUAL_WEIGHTS
) -> dict[str, Any]:
    """Summarise a run; latencies and attainment leave out the requests that arrived in the first `skip_s`."""
    took = latencies(result)
    counted = result.work.arrival_s >= result.work.arrival_s[0] + skip_s
    statuses = result.decisions.status
    first_s = float(result.work.arrival_s[0])
    span_s = max(result.end_s - first_s, 1e-9)
    finished = statuses == STATUSES.index("finished")
    lengths = result.work.lengths
    computed = result.decisions.instance >= 0
    totals: dict[str, Any] = {
        "policy": result.policy,
        "num_requests": len(statuses),
        **{f"num_{name}": int((statuses == place).sum()) for place, name in enumerate(STATUSES)},
        "num_demoted": int(result.decisions.demoted.sum()),
        "span_s": span_s,
        "requests_per_s": float(finished.sum() / span_s),
        "output_tokens_per_s": float(result.outcomes.produced_tokens.sum() / span_s),
        "instance_s": result.up_s,
        "num_preemptions": int(result.outcomes.num_preemptions.sum()),
        "hit_ratio": float(result.outcomes.hit_tokens.sum() / max(1, lengths.prompt_tokens[computed].sum())),
        "prefill_imbalance": prefill_imbalance(result),
    }
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        totals[name] = spread_of(getattr(took, name)[counted])
    if result.samples:
        free = np.stack([sample.free_blocks for sample in result.samples])
        totals["free_blocks"] = {"mean": float(free.mean()), "variance": float(free.var(axis=1).mean())}
    predicted = result.decisions.predicted_e2e_s
    if np.isfinite(predicted).any():
        errors = np.abs(predicted / took.e2e_s - 1)[np.isfinite(predicted) & finished]
        totals["e2e_error"] = spread_of(errors)
    totals |= pool_summary(result)
    if slo is not None:
        totals["slo_attainment"] = attainment(took, slo)
    if result.work.service is not None:
        totals |= service_report(served_requests(result, took).chosen(counted), took.e2e_s[counted], weights)
    return totals


def served_requests(result: RunResult, took: Latencies) -> ServedRequests:
    """Return what the requests asked for, and what they got."""
    levels, lengths = result.work.service or default_levels(len(result.work)), result.work.lengths
    return ServedRequests(
        levels=levels,
        prompt_tokens=lengths.prompt_tokens,
        output_tokens=_whole_responses(result),
        ttft_s=took.ttft_s,
        tpot_s=took.tpot_s,
        tokens_on_time=np.asarray(result.outcomes.tokens_on_time),
        finished=result.decisions.status == STATUSES.index("finished"),
        shed=result.decisions.status == STATUSES.index("shed"),
        demoted=np.asarray(result.decisions.demoted) == 1,
    )


def _whole_responses(result: RunResult) -> npt.NDArray[np.int64]:
    """Return the lengths of whole responses; engines cut those that do not fit their context."""
    finished = result.decisions.status == STATUSES.index("finished")
    return np.where(finished, result.outcomes.produced_tokens, result.work.lengths.output_tokens)


def spread_of(values: Floats) -> dict[str, float | None]:
    """Return mean and percentiles of the values that are not NaN."""
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return dict.fromkeys(("mean", *(f"p{percentile}" for percentile in PERCENTILES)))
    points = np.percentile(known, PERCENTILES)
    return {"mean": float(known.mean()), **{f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)}}


def attainment(took: Latencies, slo: SloTarget) -> float:
    """Return the share of finished requests that met all limits, of all requests."""
    good = ~np.isnan(took.e2e_s)
    for values, limit_s in ((took.ttft_s, slo.ttft_s), (took.tpot_s, slo.tpot_s), (took.e2e_s, slo.e2e_s)):
        if limit_s is not None:
            good &= np.isnan(values) | (values <= limit_s)
    return float(good.mean())


def cdf(values: Floats) -> dict[str, list[float]]:
    """Return the distribution's quantiles at evenly spaced shares."""
    known = values[~np.isnan(values)]
    shares = np.linspace(0, 1, CDF_POINTS)
    points = np.quantile(known, shares) if len(known) else np.zeros(0)
    return {"share": shares.tolist(), "value": points.tolist()}


def prefill_imbalance(result: RunResult) -> float | None:
    """Return by what share the busiest instance's prefill time is above the mean, averaged over windows of 10 s.

    A prefill counts at its first token, with the step time that its uncached prompt takes alone on its engine.
    """
    outcomes, instance = result.outcomes, result.decisions.instance
    started = (outcomes.first_token_s >= 0) & (instance >= 0)
    if not started.any() or len(result.specs) < 2:
        return None
    tokens = np.maximum(1, result.work.lengths.prompt_tokens - outcomes.hit_tokens)[started]
    seconds = np.zeros(len(tokens))
    for index, spec in enumerate(result.specs):
        mine = instance[started] == index
        if mine.any():
            known = tabulate(spec.step_time, int(tokens.max()), 1)
            cost = {int(count): _prefill_s(known, int(count)) for count in np.unique(tokens[mine])}
            seconds[mine] = [cost[int(count)] for count in tokens[mine]]
    window = ((outcomes.first_token_s[started] - result.work.arrival_s[0]) // WINDOW_S).astype(np.int64)
    work = np.zeros((int(window.max()) + 1, len(result.specs)))
    np.add.at(work, (window, instance[started]), seconds)
    work = work[work.sum(axis=1) > 0]
    return float((work.max(axis=1) / work.mean(axis=1) - 1).mean())


def _prefill_s(costs: Costs, tokens: int) -> float:
    return step_seconds(costs, tokens, 1, 0, 0.0, 1, float(tokens) ** 2, 0.0)


# One row per request.


def request_table(result: RunResult) -> dict[str, np.ndarray]:
    """Return all facts and outcomes of the requests, as columns."""
    took = latencies(result)
    times = {name: np.where(result.outcomes[name] >= 0, result.outcomes[name], np.nan)
             for name in ("scheduled_s", "first_token_s", "finished_s")}  # fmt: skip
    names = np.array([*instance_names(len(result.specs)), ""])  # without an instance, the index is -1
    return {
        "number": np.arange(len(result.work)),
        "arrival_s": result.work.arrival_s,
        "prompt_tokens": result.work.lengths.prompt_tokens,
        "output_tokens": result.work.lengths.output_tokens,
        "tag_median_tokens": result.work.tag_median,
        "fate": np.array(STATUSES)[result.decisions.status],
        "instance": names[result.decisions.instance],
        "scheduler": np.asarray(result.decisions.scheduler),
        "num_sends": np.asarray(result.decisions.num_sends),
        **times,
        "ttft_s": took.ttft_s,
        "tpot_s": took.tpot_s,
        "e2e_s": took.e2e_s,
        "predicted_ttft_s": np.asarray(result.decisions.predicted_ttft_s),
        "predicted_e2e_s": np.asarray(result.decisions.predicted_e2e_s),
        "num_preemptions": np.asarray(result.outcomes.num_preemptions),
        "prefix_hit_tokens": np.asarray(result.outcomes.hit_tokens),
        **_leg_columns(result, names),
        **_service_columns(result),
    }


def _leg_columns(result: RunResult, names: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns of prefill legs, where instances have roles."""
    if not has_roles(result.specs):
        return {}
    return {
        "prefill_instance": names[result.decisions.prefill_instance],
        **{name: np.where(result.legs[name] >= 0, result.legs[name], np.nan) for name in ("prefilled_s", "fetched_s")},
    }


def _service_columns(result: RunResult) -> dict[str, np.ndarray]:
    """Return the columns of service levels, where the requests have any."""
    levels = result.work.service
    if levels is None:
        return {}
    columns = {
        "priority": levels.priority,
        "class": np.array(CLASSES)[levels.request_class],
        "weight": levels.weight,
        "ttft_slo_s": levels.ttft_slo_s,
        "tpot_slo_s": levels.tpot_slo_s,
        "demoted": np.asarray(result.decisions.demoted),
        "tokens_on_time": np.where(result.outcomes.tokens_on_time >= 0, result.outcomes.tokens_on_time, np.nan),
    }
    return columns if levels.mix_entry is None else {**columns, "mix": levels.mix_entry}
