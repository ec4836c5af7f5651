"""A reading as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.top.reading import ClusterReading, InstanceReading

UNKNOWN = "-"
KEYS: dict[str, Callable[[InstanceReading], float]] = {
    "waiting": lambda one: one.waiting or 0,
    "running": lambda one: one.running or 0,
    "kv": lambda one: one.kv_usage or 0.0,
    "drain": lambda one: one.drained_s or 0.0,
    "requests": lambda one: one.requests_per_s or 0.0,
}
NAME = "name"
SORTS = (NAME, *KEYS)
COLUMNS = (
    "instance",
    "role",
    "state",
    "run",
    "wait",
    "resv",
    "KV",
    "prefill",
    "drains",
    "pace",
    "req/s",
    "error",
    "age",
)
TEXT_COLUMNS = 3  # the others are numbers, at the right of their column


def lines_of(reading: ClusterReading, sort: str = NAME, max_lines: int | None = None) -> list[str]:
    """Write a reading; where there are too many instances, how many are left out."""
    head = [*summary(reading), *(f"! {problem}" for problem in reading.problems), ""]
    rows = [row_of(one) for one in ordered(reading.instances, sort)]
    num_left_out = 0
    if max_lines is not None and len(head) + 1 + len(rows) > max_lines:
        kept = max(0, max_lines - len(head) - 2)
        rows, num_left_out = rows[:kept], len(rows) - kept
    widths = [max(len(row[column]) for row in (COLUMNS, *rows)) for column in range(len(COLUMNS))]
    more = [f"… and {num_left_out} more instances"] if num_left_out else []
    return [*head, *(aligned(row, widths) for row in (COLUMNS, *rows)), *more]


def summary(reading: ClusterReading) -> list[str]:
    """Write the rates of the cluster."""
    ready = sum(one.state == "ready" for one in reading.instances)
    decisions = (
        f"{reading.policy or 'no scheduler'} · {ready} of {len(reading.instances)} instances ready"
        f" · {per_second(reading.decisions_per_s)} decisions/s, {ms(reading.decision_s)} each"
        f" · {number(reading.held)} held, {per_second(reading.shed_per_s)} refused/s"
    )
    requests = (
        f"{per_second(reading.requests_per_s)} requests/s, {per_second(reading.errors_per_s)} errors/s,"
        f" {number(reading.under_way)} under way · TTFT P50 {ms(reading.ttft_p50_s)}, P95 {ms(reading.ttft_p95_s)}"
        f" · latency P95 {ms(reading.e2e_p95_s)} · targets attained {share(reading.attained)}"
    )
    return [decisions, requests]


def ordered(instances: Sequence[InstanceReading], sort: str) -> list[InstanceReading]:
    """Sort by name, or the busiest first."""
    by_name = sorted(instances, key=lambda one: one.instance)
    return by_name if sort == NAME else sorted(by_name, key=KEYS[sort], reverse=True)


def row_of(one: InstanceReading) -> tuple[str, ...]:
    """Write the cells of an instance."""
    return (
        one.instance,
        one.role if not one.tier else f"{one.role}/{one.tier}",
        one.state,
        number(one.running),
        number(one.waiting),
        number(one.reserved),
        share(one.kv_usage),
        number(one.queued_prefill_tokens),
        seconds(one.drained_s),
        UNKNOWN if one.pace is None else f"{one.pace:.2f}",
        per_second(one.requests_per_s),
        share(one.forecast_error),
        seconds(one.age_s),
    )


def aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Write a row of a table."""
    cells = [
        cell.ljust(width) if column < TEXT_COLUMNS else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def number(value: float | None) -> str:
    """Write a count."""
    return UNKNOWN if value is None else f"{value:.0f}"


def per_second(value: float | None) -> str:
    """Write a rate."""
    return UNKNOWN if value is None else f"{value:.1f}"


def share(value: float | None) -> str:
    """Write a share."""
    return UNKNOWN if value is None else f"{value:.0%}"


def ms(value: float | None) -> str:
    """Write a latency."""
    return UNKNOWN if value is None else f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def seconds(value: float | None) -> str:
    """Write a time."""
    return UNKNOWN if value is None else f"{value:.2f} s"
