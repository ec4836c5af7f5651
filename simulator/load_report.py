"""Reports of a load: latencies, goodput and failures, as numbers, as a table and as CSV."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TextIO

import numpy as np

from predictor.gain import (
    EQUAL_WEIGHTS,
    GainWeights,
    ServedRequests,
    ServiceLevels,
    attainment_report,
    attainment_table,
)
from predictor.request import CLASSES, Slo
from simulator.load_plan import Planned, slo_of, target_of
from simulator.service_report import attained_table, service_report, service_table

SHED = "shed"  # the failure of a request that was refused with a time after which to retry
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
COLUMNS = (
    "request_id", "due_s", "sent_s", "prompt_tokens", "asked_tokens", "output_tokens", "ttft_s", "tpot_s", "e2e_s",
    "met_slo", "instance", "predicted_ttft_s", "predicted_e2e_s", "failure", "note", "class", "priority", "mix",
    "tokens_on_time", "shed_reason", "retry_after_s", "tenant", "when_late", "demoted", "retries", "retried_after_s",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """The outcome of one request; times are seconds since it was due, None if it did not get that far."""

    plan: Planned
    sent_s: float = 0.0  # how late it was sent
    answered_s: float | None = None  # the status and headers of the reply
    ttft_s: float | None = None
    e2e_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int = 0
    tokens_on_time: int = 0  # of those with a deadline
    failure: str | None = None  # the kind of failure
    note: str = ""  # the server's error message
    shed_reason: str = ""
    retry_after_s: float | None = None  # of a shed request
    num_retries: int = 0  # times that it was sent again after it was shed
    retried_after_s: float = 0.0  # from when it was due first until it was due again: its other times count from there
    demoted: bool = False
    instance: str = ""
    predicted_ttft_s: float | None = None  # from the decision on
    predicted_e2e_s: float | None = None
    decision_s: float | None = None  # by the wall clock

    def reset_for_retry(self, after_s: float) -> None:
        """Forget how the request was shed; it is due again `after_s` after it was due first."""
        self.num_retries += 1
        self.retried_after_s = after_s
        self.failure, self.note, self.shed_reason, self.retry_after_s = None, "", "", None
        self.answered_s, self.instance, self.demoted = None, "", False


def meets_slo(result: RequestResult, slo: Slo) -> bool:
    """Whether a request succeeded and met its SLO targets."""
    for name in ("ttft_s", "tpot_s"):
        target_s = target_of(name, result.plan, slo)
        if target_s is not None and (getattr(result, name) or 0.0) > target_s:
            return False
    return result.failure is None


def served_requests(results: Sequence[RequestResult], slo: Slo) -> ServedRequests:
    """Return what requests asked for, by their own targets or those of the run, and what they got."""
    targets = [slo_of(result.plan, slo) for result in results]
    finished = np.array([result.failure is None for result in results], np.bool_)
    entries = [result.plan.mix_entry for result in results]
    tenants = [result.plan.tenant for result in results]
    return ServedRequests(
        levels=ServiceLevels(
            ttft_slo_s=np.array([target.ttft_s for target in targets], np.float64),
            tpot_slo_s=np.array([target.tpot_s for target in targets], np.float64),
            weight=np.array([result.plan.weight for result in results], np.float64),
            priority=np.array([result.plan.priority for result in results], np.int64),
            request_class=np.array([CLASSES.index(result.plan.request_class) for result in results], np.int64),
            mix_entry=np.array(entries) if any(entries) else None,
            tenant=np.array(tenants) if any(tenants) else None,
        ),
        prompt_tokens=np.array([result.plan.prompt_tokens for result in results], np.int64),
        output_tokens=np.array(
            [result.output_tokens if result.failure is None else result.plan.output_tokens for result in results],
            np.int64,
        ),
        ttft_s=np.array([result.ttft_s for result in results], np.float64),
        tpot_s=np.array([result.tpot_s for result in results], np.float64),
        tokens_on_time=np.array([result.tokens_on_time for result in results], np.int64),
        finished=finished,
        shed=np.array([result.failure == SHED for result in results], np.bool_),
        demoted=np.array([result.demoted for result in results], np.bool_),
    )


def summary(results: Sequence[RequestResult], slo: Slo, weights: GainWeights = EQUAL_WEIGHTS) -> dict[str, Any]:
    """Summarise a run; times are in seconds."""
    successful = [result for result in results if result.failure is None]
    shed = [result for result in results if result.failure == SHED]
    failed = [result for result in results if result.failure not in (None, SHED)]
    begin_s = min((result.plan.due_s for result in results), default=0.0)
    ends_s = [one.plan.due_s + one.retried_after_s + (one.e2e_s or one.sent_s) for one in results]
    end_s = max(ends_s, default=0.0)
    last_due_s = max((result.plan.due_s for result in results), default=0.0)
    duration_s = max(end_s - begin_s, 1e-9)
    num_met = sum(meets_slo(result, slo) for result in results)
    wrong_length = sum(result.output_tokens != result.plan.output_tokens for result in successful)
    spread_s = last_due_s - begin_s
    return {
        "num_requests": len(results),
        "num_ok": len(successful),
        "num_shed": len(shed),
        "shed": dict(Counter(result.shed_reason for result in shed).most_common()),
        "retry_after_s": spread(result.retry_after_s for result in shed),
        "num_demoted": sum(result.demoted for result in results),
        "retries": retries_of(results),
        "num_failed": len(failed),
        "failures": dict(Counter(result.failure for result in failed).most_common()),
        "failure_notes": {result.failure: result.note for result in reversed(failed)},
        "num_wrong_length": wrong_length,
        "duration_s": duration_s,
        "offered_requests_per_s": (len(results) - 1) / spread_s if spread_s > 0 else None,
        "requests_per_s": len(successful) / duration_s,
        "output_tokens_per_s": sum(result.output_tokens for result in successful) / duration_s,
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "goodput_requests_per_s": num_met / duration_s,
        "goodput_share": num_met / len(results) if results else 0.0,
        **{name: spread(getattr(result, name) for result in successful) for name in LATENCIES},
        "sent_late_s": spread(result.sent_s for result in results),
        "forecast_error": forecast_error(successful),
        "instances": dict(sorted(Counter(result.instance for result in results if result.instance).items())),
        **service_report(
            served_requests(results, slo), np.array([result.e2e_s for result in results], np.float64), weights
        ),
        "of_admitted": attainment_report(
            served_requests([result for result in results if result.failure != SHED], slo), weights
        ),
    }


def retries_of(results: Sequence[RequestResult]) -> dict[str, Any] | None:
    """Sum up the shed requests that were sent again; None where there are none.

    `admitted_at_once` is the share that was admitted when it was sent again for the first time.
    """
    again = [result for result in results if result.num_retries]
    if not again:
        return None
    admitted = [result for result in again if result.failure != SHED]
    return {
        "num_requests": len(again),
        "num_retries": sum(result.num_retries for result in again),
        "admitted": len(admitted) / len(again),
        "admitted_at_once": sum(result.num_retries == 1 for result in admitted) / len(again),
        "admitted_after_s": spread(result.retried_after_s for result in admitted),
    }


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean and percentiles; None without values."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(known, (50, 90, 99)))
    return {"mean": fmean(known), "p50": p50, "p90": p90, "p99": p99}


def forecast_error(results: Sequence[RequestResult]) -> dict[str, Any] | None:
    """Compare the forecasts in reply headers with the latencies from sending on; None without forecasts."""
    errors: dict[str, Any] = {}
    for name in ("ttft_s", "e2e_s"):
        pairs = [
            (predicted, actual - result.sent_s)
            for result in results
            if (predicted := getattr(result, f"predicted_{name}")) is not None
            and math.isfinite(predicted)
            and (actual := getattr(result, name)) is not None
            and actual > result.sent_s
        ]
        if pairs:
            relative = [(predicted - actual) / actual for predicted, actual in pairs]
            errors[name] = {"median": median(map(abs, relative)), "bias": median(relative), "n": len(pairs)}
    return errors or None


def table(total: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a summary for people."""
    yield f"{'':12}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p99"))
    for name in LATENCIES:
        if total[name] is not None:
            cells = "".join(f"{1000 * value:>12.1f}" for value in total[name].values())
            yield f"{name.removesuffix('_s').upper().replace('E2E', 'e2e') + ' ms':12}{cells}"
    yield ""
    yield from _lines(total)


def _lines(total: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{total['num_ok']} of {total['num_requests']} requests in {total['duration_s']:.1f} s: "
        f"{total['requests_per_s']:.2f} requests/s, {total['output_tokens_per_s']:.0f} tokens/s"
    )
    targets = [f"{name[:4].upper()} {1000 * value:g} ms" for name, value in total["slo"].items() if value is not None]
    if targets:
        share, rate = total["goodput_share"], total["goodput_requests_per_s"]
        yield f"within {' and '.join(targets)}: {100 * share:.1f} %, {rate:.2f} requests/s"
    for name, error in (total["forecast_error"] or {}).items():
        label = name.removesuffix("_s")
        yield f"predicted {label}: median error {100 * error['median']:.1f} %, bias {100 * error['bias']:+.1f} %"
    if total["instances"]:
        yield "requests by instance: " + ", ".join(f"{name} {num}" for name, num in total["instances"].items())
    if total["num_wrong_length"]:
        yield f"{total['num_wrong_length']} responses did not have the requested length"
    late = total["sent_late_s"]
    if late is not None and late["p99"] > 0.05:
        yield f"sent late: p99 {1000 * late['p99']:.0f} ms (latencies count from when a request was due)"
    if total["num_shed"]:
        reasons = ", ".join(f"{reason} {num}" for reason, num in total["shed"].items())
        yield f"shed: {total['num_shed']} ({reasons}), retry after {total['retry_after_s']['p50']:.1f} s in the median"
    if total["retries"]:
        again = total["retries"]
        yield (
            f"sent again: {again['num_requests']}, {100 * again['admitted_at_once']:.1f} % of them admitted the first "
            f"time, {100 * again['admitted']:.1f} % in the end"
        )
    if total["num_demoted"]:
        yield f"demoted to best effort: {total['num_demoted']}"
    for kind, num in total["failures"].items():
        note = total["failure_notes"][kind]
        yield f"failed: {num} {kind}" + (f", the first one: {note}" if note else "")
    yield from service_table(total)
    yield from attained_table(total)
    if total["num_shed"] and total["of_admitted"]:
        yield ""
        yield "of those that were not shed:"
        yield from attainment_table(total["of_admitted"])


def write_csv(results: Sequence[RequestResult], slo: Slo, out: TextIO) -> None:
    """Write one line per request."""
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    column: Callable[[float | None], str] = lambda value: "" if value is None else f"{value:.6f}"  # noqa: E731
    for result in sorted(results, key=lambda result: result.plan.due_s):
        writer.writerow((
            result.plan.request_id, column(result.plan.due_s), column(result.sent_s), result.plan.prompt_tokens,
            result.plan.output_tokens, result.output_tokens, column(result.ttft_s), column(result.tpot_s),
            column(result.e2e_s), int(meets_slo(result, slo)), result.instance, column(result.predicted_ttft_s),
            column(result.predicted_e2e_s), result.failure or "", result.note, result.plan.request_class,
            result.plan.priority, result.plan.mix_entry,
            "" if slo_of(result.plan, slo).ttft_s is None else result.tokens_on_time,
            result.shed_reason, column(result.retry_after_s), result.plan.tenant, result.plan.when_late,
            int(result.demoted), result.num_retries, column(result.retried_after_s),
        ))  # fmt: skip
