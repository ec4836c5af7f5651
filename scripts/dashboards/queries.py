"""PromQL expressions that panels share: rates, ratios without gaps of NaN, quantiles and means of histograms."""

from __future__ import annotations

from collections.abc import Sequence

INTERVAL = "$__rate_interval"


def series(metric: str, where: str = "") -> str:
    """Write a metric with its label matchers."""
    return f"{metric}{{{where}}}" if where else metric


def rate(metric: str, *, by: Sequence[str] = (), where: str = "") -> str:
    """Sum the rate per second of a counter, by labels."""
    return aggregate("sum", f"rate({series(metric, where)}[{INTERVAL}])", by)


def aggregate(operation: str, expression: str, by: Sequence[str] = ()) -> str:
    """Apply `sum`, `max`, `count` and so on, by labels."""
    grouping = f" by ({', '.join(by)}) " if by else ""
    return f"{operation}{grouping}({expression})"


def ratio(part: str, whole: str) -> str:
    """Divide; where the whole is 0 there is a gap."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, histogram: str, *, by: Sequence[str] = (), where: str = "") -> str:
    """Estimate a quantile of a histogram, by labels."""
    return f"histogram_quantile({q:g}, {rate(f'{histogram}_bucket', by=('le', *by), where=where)})"


def mean(histogram: str, *, by: Sequence[str] = (), where: str = "") -> str:
    """Take the mean of a histogram or summary, by labels."""
    return ratio(rate(f"{histogram}_sum", by=by, where=where), rate(f"{histogram}_count", by=by, where=where))


def within(histogram: str, bound: str, *, by: Sequence[str] = (), where: str = "") -> str:
    """Take the share of a histogram's observations up to the bound of a bucket."""
    matchers = ", ".join(part for part in (where, f'le="{bound}"') if part)
    below = rate(f"{histogram}_bucket", by=by, where=matchers)
    return ratio(below, rate(f"{histogram}_count", by=by, where=where))


def or_zero(expression: str) -> str:
    """Show 0 where a counter has no series yet."""
    return f"(({expression}) or vector(0))"
