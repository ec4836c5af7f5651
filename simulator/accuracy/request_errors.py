"""How far replayed requests are off: each by itself, their aggregates, by phase, and by how many ran at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.accuracy.replayed_window import RequestTimes
from simulator.accuracy.step_errors import power_ranges, range_text
from simulator.accuracy.window import Array

QUANTITIES = ("ttft", "tpot", "e2e")
SHARES = (50, 90, 99)
PHASES = ("queue", "prefill", "decode")
MIN_SECONDS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityErrors:
    """Relative errors of single requests: medians and 90th percentile of their size, and their median as the bias."""

    quantity: str
    num: int
    median: float
    p90: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateError:
    """One number about all requests, measured and replayed."""

    name: str
    unit: str
    measured: float
    replayed: float

    @property
    def error(self) -> float:
        """Replayed over measured, minus 1."""
        return self.replayed / self.measured - 1 if self.measured > 0 else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseError:
    """The mean time of a phase, measured and replayed, and the difference as a share of the mean measured e2e."""

    phase: str
    num: int
    measured_s: float
    replayed_s: float
    of_e2e: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyErrors:
    """The errors of requests beside which, on average, as many others were in progress as `concurrency` says."""

    concurrency: str
    errors: tuple[QuantityErrors, ...]


def relative_errors(replayed: Array, measured: Array) -> Array:
    """Return the errors of requests that have both times."""
    known = np.isfinite(replayed) & np.isfinite(measured) & (measured > MIN_SECONDS)
    return np.asarray((replayed[known] - measured[known]) / measured[known])


def quantity_errors(replayed: RequestTimes, measured: RequestTimes) -> tuple[QuantityErrors, ...]:
    """Summarise the errors of TTFT, TPOT and e2e."""
    return tuple(_errors_of(name, replayed, measured) for name in QUANTITIES)


def _errors_of(name: str, replayed: RequestTimes, measured: RequestTimes) -> QuantityErrors:
    errors = relative_errors(getattr(replayed, f"{name}_s"), getattr(measured, f"{name}_s"))
    if not len(errors):
        return QuantityErrors(quantity=name, num=0, median=np.nan, p90=np.nan, bias=np.nan)
    sizes = np.abs(errors)
    return QuantityErrors(
        quantity=name,
        num=len(errors),
        median=float(np.median(sizes)),
        p90=float(np.percentile(sizes, 90)),
        bias=float(np.median(errors)),
    )


def aggregate_errors(replayed: RequestTimes, measured: RequestTimes) -> list[AggregateError]:
    """Compare means and percentiles of the latencies, and the throughput."""
    rows = []
    for name in QUANTITIES:
        known = [np.asarray(getattr(times, f"{name}_s")) for times in (measured, replayed)]
        both = np.isfinite(known[0]) & np.isfinite(known[1])
        if both.any():
            sides = [values[both] for values in known]
            rows.append(_aggregate(f"{name}_s.mean", "s", *(float(values.mean()) for values in sides)))
            at = np.percentile(sides, SHARES, axis=1)
            rows += [
                _aggregate(f"{name}_s.p{share}", "s", *pair) for share, pair in zip(SHARES, at.tolist(), strict=True)
            ]
    ended = np.isfinite(measured.e2e_s) & np.isfinite(replayed.e2e_s)
    if not ended.any():
        return rows
    sides_s = [_span_s(times, ended) for times in (measured, replayed)]
    for name, amount in (
        ("requests", float(ended.sum())),
        ("output_tokens", float(measured.output_tokens[ended].sum())),
    ):
        rows.append(_aggregate(f"{name}_per_s", f"{name}/s", *(amount / span_s for span_s in sides_s)))
    return rows


def _aggregate(name: str, unit: str, measured: float, replayed: float) -> AggregateError:
    return AggregateError(name=name, unit=unit, measured=measured, replayed=replayed)


def _span_s(times: RequestTimes, chosen: NDArray[np.bool_]) -> float:
    """Return the seconds from the first arrival to the last token."""
    return max(MIN_SECONDS, float(times.end_s[chosen].max() - times.arrival_s[chosen].min()))


def phase_errors(replayed: RequestTimes, measured: RequestTimes) -> list[PhaseError]:
    """Compare the mean times that requests wait, are prefilled, and are decoded; only where all are known."""
    e2e_s = np.nanmean(measured.e2e_s) if np.isfinite(measured.e2e_s).any() else np.nan
    rows = []
    for phase in PHASES:
        ours, theirs = getattr(replayed, f"{phase}_s"), getattr(measured, f"{phase}_s")
        known = np.isfinite(ours) & np.isfinite(theirs)
        if known.any():
            means = float(theirs[known].mean()), float(ours[known].mean())
            rows.append(
                PhaseError(
                    phase=phase,
                    num=int(known.sum()),
                    measured_s=means[0],
                    replayed_s=means[1],
                    of_e2e=float((means[1] - means[0]) / e2e_s),
                )
            )
    return rows


def concurrency_errors(replayed: RequestTimes, measured: RequestTimes) -> list[ConcurrencyErrors]:
    """Summarise the errors by the mean number of requests in progress during each one."""
    beside = mean_concurrency(measured)
    return [
        ConcurrencyErrors(
            concurrency=range_text(low, high),
            errors=quantity_errors(replayed.where(chosen), measured.where(chosen)),
        )
        for low, high, chosen in _by_concurrency(beside)
    ]


def _by_concurrency(beside: Array) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    counts = np.rint(beside)
    known = np.isfinite(counts)
    for low, high in power_ranges(int(counts[known].max(initial=0))):
        chosen = known & (counts >= low) & (counts <= high)
        if chosen.any():
            yield low, high, chosen


def mean_concurrency(times: RequestTimes) -> Array:
    """Return the mean number of requests in progress, itself included, from each request's arrival to its end."""
    ended = np.isfinite(times.e2e_s)
    starts, ends = times.arrival_s[ended], times.end_s[ended]
    moments = np.concatenate((starts, ends))
    order = np.argsort(moments, kind="stable")
    changes = np.concatenate((np.ones(len(starts)), -np.ones(len(ends))))[order]
    moments = moments[order]
    area = np.concatenate(([0.0], np.cumsum(np.cumsum(changes)[:-1] * np.diff(moments)))) if len(moments) else moments
    whole = np.full(len(times), np.nan)
    inside = np.interp(ends, moments, area) - np.interp(starts, moments, area) if len(moments) else starts
    whole[ended] = inside / np.maximum(ends - starts, MIN_SECONDS)
    return whole
