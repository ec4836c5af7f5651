"""The accuracy of a profile on a window, as text, JSON, and one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from simulator.accuracy.accuracy import WindowAccuracy, plain_errors, verdict
from simulator.accuracy.recalibration import MEANING
from simulator.accuracy.replayed_window import RequestTimes
from simulator.accuracy.request_errors import QUANTITIES, QuantityErrors
from simulator.accuracy.step_errors import StepErrors
from simulator.experiments.charts import dot_chart, line_chart
from simulator.report_page import html_page, html_table

TITLES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "e2e"}
SHARES = np.linspace(0, 100, 51)


def as_json(accuracy: WindowAccuracy, tolerance: float) -> dict[str, Any]:
    """Return all numbers by name; those that are not known are null."""
    header, change = accuracy.window.header, accuracy.recalibration
    report: dict[str, Any] = finite({
        "profile": accuracy.profile.name,
        "instance": header.instance,
        "model": header.model,
        "source": header.source,
        "duration_s": header.end_s - header.begin_s,
        "num_requests": len(accuracy.window.requests),
        "num_compared": len(accuracy.measured),
        "num_steps": len(accuracy.window.steps),
        "num_lost_steps": accuracy.window.steps.num_lost,
        "tolerance": tolerance,
        "holds": accuracy.holds(tolerance),
        "verdict": verdict(accuracy, tolerance),
        "biases": [asdict(one) for one in accuracy.biases],
        "errors": plain_errors(accuracy.errors),
        "aggregates": {
            one.name: {"measured": one.measured, "replayed": one.replayed, "error": one.error, "unit": one.unit}
            for one in accuracy.aggregates
        },
        "phases": {one.phase: _without(asdict(one), "phase") for one in accuracy.phases},
        "by_concurrency": {one.concurrency: plain_errors(one.errors) for one in accuracy.by_concurrency},
        "steps": {one.name: _without(asdict(one), "phase", "decodes") for one in accuracy.steps},
        "outside_valid_range": accuracy.outside,
        "forecast_at_arrival": plain_errors(accuracy.forecast),
        "with_measured_pace": plain_errors(accuracy.with_pace),
        "recalibration": None
        if change is None
        else {
            "constants": {one.name: _without(asdict(one), "name") for one in change.constants},
            "held_out_error": {"before": change.error_before, "after": change.error_after},
            "note": change.note,
            "errors": plain_errors(accuracy.recalibrated),
        },
    })  # fmt: skip
    return report


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_text(accuracy: WindowAccuracy, tolerance: float) -> Iterator[str]:
    """Yield the lines of the report for people."""
    yield from _opening(accuracy)
    yield ""
    for title, table in tables(accuracy):
        yield title
        yield from _aligned(table)
        yield ""
    yield from _recalibration_lines(accuracy)
    yield verdict(accuracy, tolerance)


def _opening(accuracy: WindowAccuracy) -> Iterator[str]:
    window, header = accuracy.window, accuracy.window.header
    of = " ".join(part for part in (header.instance, header.model) if part)
    yield (
        f"{len(accuracy.measured)} of {len(window.requests)} requests and {len(window.steps)} steps in "
        f"{header.end_s - header.begin_s:.1f} s{f' of {of}' if of else ''}, "
        f"replayed with the profile {accuracy.profile.name}"
    )
    if window.steps.num_lost:
        yield f"{window.steps.num_lost} steps were lost: the state was not read often enough"
    if accuracy.outside:
        yield f"{_percent(accuracy.outside)} of the time is in batches larger than those that the profile was made from"
    if cached := sum(one.cached_tokens for one in window.requests if not one.facts.prefix_hashes):
        yield f"{cached} prompt tokens were cached whose contents are not known: the replay computes them"


Table = list[list[str]]


def tables(accuracy: WindowAccuracy) -> list[tuple[str, Table]]:
    """Return the tables with their titles; the first row is the head."""
    named: list[tuple[str, Sequence[QuantityErrors] | None]] = [
        ("with the profile", accuracy.errors if len(accuracy.measured) else None),
        ("forecast at arrival", accuracy.forecast if len(accuracy.measured) else None),
        ("with the measured pace", accuracy.with_pace if len(accuracy.measured) else None),
    ]
    if accuracy.recalibration is not None and accuracy.recalibration.changes and len(accuracy.measured):
        named.insert(1, ("recalibrated", accuracy.recalibrated))
    known = [(name, errors) for name, errors in named if errors is not None]
    found = [
        ("Errors of single requests: median, 90th percentile, bias", _request_table(known)),
        ("Aggregates", _aggregate_table(accuracy)),
        ("Mean time by phase", _phase_table(accuracy)),
        ("Median errors by number of requests in progress", _concurrency_table(accuracy)),
        ("Steps by phase and number of decodes", _step_table(accuracy.steps)),
    ]
    return [(title, table) for title, table in found if len(table) > 1]


def _request_table(named: Sequence[tuple[str, Sequence[QuantityErrors]]]) -> Table:
    rows = [["", *(TITLES[quantity] for quantity in QUANTITIES)]]
    for name, errors in named:
        rows.append([name, *(f"{_percent(one.median)}, {_percent(one.p90)}, {_signed(one.bias)}" for one in errors)])
    return rows


def _aggregate_table(accuracy: WindowAccuracy) -> Table:
    rows = [["", "measured", "replayed", "error"]]
    for one in accuracy.aggregates:
        name = one.name.replace("_s.", " ").replace("_per_s", " per s").replace("_", " ")
        rows.append([name, _number(one.measured), _number(one.replayed), _signed(one.error)])
    return rows


def _phase_table(accuracy: WindowAccuracy) -> Table:
    rows = [["", "measured s", "replayed s", "difference, of e2e"]]
    rows += [
        [one.phase, _number(one.measured_s), _number(one.replayed_s), _signed(one.of_e2e)] for one in accuracy.phases
    ]
    return rows


def _concurrency_table(accuracy: WindowAccuracy) -> Table:
    rows = [["requests in progress", "n", *(TITLES[quantity] for quantity in QUANTITIES)]]
    rows += [
        [one.concurrency, str(max(e.num for e in one.errors)), *(_percent(e.median) for e in one.errors)]
        for one in accuracy.by_concurrency
    ]
    return rows


def _step_table(steps: Sequence[StepErrors]) -> Table:
    rows = [["", "steps", "time", "bias", "median error", "noise", "drift"]]
    whole_s = steps[0].measured_s if steps else 1.0
    rows += [
        [
            one.name,
            str(one.num_steps),
            _percent(one.measured_s / whole_s),
            _signed(one.bias, one.half),
            *(_percent(value) for value in (one.error, one.noise, one.drift)),
        ]
        for one in steps
    ]
    return rows


def _recalibration_lines(accuracy: WindowAccuracy) -> Iterator[str]:
    change = accuracy.recalibration
    if change is None:
        return
    if not change.changes:
        yield f"recalibration: {change.note}"
        return
    for one in change.constants:
        meaning = MEANING[one.name]
        if one.why_not:
            yield f"recalibration: {one.name} ({meaning}) {one.why_not}"
        else:
            yield f"recalibration: {one.name} ({meaning}) {one.change:+.3g}, from {one.low:+.3g} to {one.high:+.3g}"
    before, after = _percent(change.error_before), _percent(change.error_after)
    yield f"its error on what was held out: {before} before, {after} after"


def as_html(accuracy: WindowAccuracy, tolerance: float) -> str:
    """Return a page with charts and tables."""
    body = [f"<h1>Accuracy of {escape(accuracy.profile.name)}</h1>"]
    body += [f"<p>{escape(line)}</p>" for line in (*_opening(accuracy), verdict(accuracy, tolerance))]
    body += [f"<p>{escape(line)}</p>" for line in _recalibration_lines(accuracy)]
    body += [f"<figure>{chart}</figure>" for chart in _charts(accuracy) if chart]
    for title, table in tables(accuracy):
        body += [f"<h2>{escape(title)}</h2>", html_table(_markdown(table))]
    return html_page(f"Accuracy of {accuracy.profile.name}", body)


def _charts(accuracy: WindowAccuracy) -> Iterator[str]:
    for quantity in QUANTITIES:
        curves = {
            name: _distribution(times, quantity)
            for name, times in (("measured", accuracy.measured), ("replayed", accuracy.replayed))
        }
        if all(curves.values()):
            yield line_chart(f"{TITLES[quantity]}, s", "percentile", curves, marks=False)
    biases = {one.name: (100 * one.bias, 0.0 if math.isnan(one.half) else 100 * one.half) for one in accuracy.steps}
    yield dot_chart("bias of predicted step times, %", biases)


def _distribution(times: RequestTimes, quantity: str) -> list[tuple[float, float, float]]:
    values = getattr(times, f"{quantity}_s")
    values = values[np.isfinite(values)]
    if not len(values):
        return []
    return [
        (float(share), float(value), 0.0) for share, value in zip(SHARES, np.percentile(values, SHARES), strict=True)
    ]


def _markdown(table: Table) -> str:
    head, *rest = table
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _aligned(table: Table) -> Iterator[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for first, *others in table:
        cells = "".join(f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        yield f"  {first:<{widths[0]}}{cells}"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f} %"


def _signed(value: float, half: float = math.nan) -> str:
    if math.isnan(value):
        return ""
    return f"{100 * value:+.1f} %" + ("" if math.isnan(half) else f" ± {100 * half:.1f}")


def _number(value: float) -> str:
    return f"{value:.4g}"
