"""One page about served requests: percentiles, forecasts beside outcomes, queues and batches over time, targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from predictor.outcome import Outcome
from simulator.experiments.charts import lane_chart, line_chart, scatter_chart
from simulator.load_report import RequestResult
from simulator.metrics import request_table, spread_of
from simulator.report_page import figure, heading, html_page, paragraph, rows_table
from simulator.result import RunResult

Floats = npt.NDArray[np.float64]

SHARES = (*range(0, 99, 2), 99, 99.5, 100)  # percentiles of the curves
MAX_LANES = 24  # of more instances, the first ones are drawn
MAX_STEPS = 400  # of a lane
LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "e2e"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """Requests in columns, with the times of a common clock; NaN for what did not happen or is not known."""

    name: str  # of the policy, or of the endpoint
    instance: npt.NDArray[np.str_]  # empty where it is not known
    arrival_s: Floats
    scheduled_s: Floats  # first step that includes the request
    finished_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    predicted_ttft_s: Floats
    predicted_e2e_s: Floats
    notes: Sequence[str] = ()  # lines of text about the run, such as what it attained


def run_page(title: str, runs: Sequence[ServedRun]) -> str:
    """Return a self-contained page that compares runs."""
    return html_page(title, ["<h1>", escape(title), "</h1>", *run_sections(runs)])


def run_sections(runs: Sequence[ServedRun]) -> list[str]:
    """Return the parts of a page about runs."""
    body = [_latency_table(runs), heading("Latencies by percentile")]
    body += [figure(percentile_chart(label, {run.name: getattr(run, name) for run in runs}))
             for name, label in LATENCIES.items()]  # fmt: skip
    accuracy = [figure(accuracy_chart(label, _pairs_by_run(runs, name)))
                for name, label in LATENCIES.items() if name != "tpot_s"]  # fmt: skip
    if any(accuracy):
        body += [heading("Predicted and actual"), *accuracy, _error_table(runs)]
    body.append(heading("Requests over time, by instance"))
    for run in runs:
        body.append(figure(load_chart(run)))
        num = len(np.unique(run.instance[run.instance != ""]))
        if num > MAX_LANES:
            body.append(paragraph(f"{run.name}: the first {MAX_LANES} of {num} instances."))
    notes = [(run.name, line) for run in runs for line in run.notes]
    if notes:
        text = "\n".join(line if len(runs) == 1 else f"{name}: {line}" for name, line in notes)
        body += [heading("Summary"), "<pre>", escape(text), "</pre>"]
    return body


def percentile_chart(label: str, values: Mapping[str, Floats]) -> str:
    """Draw the percentiles of a latency, a curve for each run, on a logarithmic scale."""
    curves = {}
    for name, column in values.items():
        known = column[np.isfinite(column)]
        if len(known):
            points = np.percentile(known, SHARES)
            curves[name] = [(float(share), float(point), 0.0) for share, point in zip(SHARES, points, strict=True)]
    return line_chart(f"{label}, s", "percentile", curves, log=True, marks=False) if curves else ""


def accuracy_chart(label: str, pairs: Mapping[str, tuple[Floats, Floats]]) -> str:
    """Draw actual latencies against predicted ones."""
    series = {
        name: list(zip(predicted.tolist(), actual.tolist(), strict=True)) for name, (predicted, actual) in pairs.items()
    }
    return scatter_chart(f"{label}, s", "predicted", "actual", {name: one for name, one in series.items() if one})


def load_chart(run: ServedRun) -> str:
    """Draw how many requests run and wait on each instance; where starts are not known, how many are under way."""
    knows_starts = bool(np.isfinite(run.scheduled_s).any())
    start_s = np.where(np.isfinite(run.scheduled_s), run.scheduled_s, run.arrival_s)
    lanes = {}
    for name in sorted(set(run.instance.tolist()) - {""})[:MAX_LANES]:
        mine = (run.instance == name) & np.isfinite(run.finished_s)
        lane = {"running" if knows_starts else "under way": under_way(start_s[mine], run.finished_s[mine])}
        if knows_starts:
            lane["waiting"] = under_way(run.arrival_s[mine], start_s[mine])
        lanes[name] = lane
    return lane_chart(run.name, "s", lanes)


def under_way(start_s: Floats, end_s: Floats) -> list[tuple[float, float]]:
    """Return how many of some spans are open, as (time, number) at each change; long lists keep the highest ones."""
    times = np.concatenate((start_s, end_s))
    changes = np.concatenate((np.ones(len(start_s)), -np.ones(len(end_s))))
    order = np.argsort(times, kind="stable")
    times, counts = times[order], np.maximum(0.0, np.cumsum(changes[order]))
    every = -(-len(times) // MAX_STEPS) or 1
    starts = np.arange(0, len(times), every)
    if every > 1:
        counts = np.maximum.reduceat(counts, starts)
    return list(zip(times[starts].tolist(), counts.tolist(), strict=True))


def _pairs_by_run(runs: Sequence[ServedRun], name: str) -> dict[str, tuple[Floats, Floats]]:
    pairs = {}
    for run in runs:
        predicted, actual = getattr(run, f"predicted_{name}"), getattr(run, name)
        known = np.isfinite(predicted) & np.isfinite(actual) & (actual > 0)
        pairs[run.name] = predicted[known], actual[known]
    return pairs


def _latency_table(runs: Sequence[ServedRun]) -> str:
    rows = []
    for run in runs:
        for name, label in LATENCIES.items():
            spread = spread_of(getattr(run, name))
            rows.append((run.name, label, *("" if value is None else f"{value:.4g}" for value in spread.values())))
    return rows_table(("run", "latency, s", "mean", "p50", "p90", "p99"), rows)


def _error_table(runs: Sequence[ServedRun]) -> str:
    rows = []
    for name, label in LATENCIES.items():
        if name == "tpot_s":
            continue
        for run_name, (predicted, actual) in _pairs_by_run(runs, name).items():
            if len(actual):
                error = predicted / actual - 1
                cells = (np.median(np.abs(error)), np.percentile(np.abs(error), 90), np.median(error))
                rows.append((run_name, label, str(len(actual)), *(f"{100 * value:.1f} %" for value in cells)))
    return rows_table(("run", "forecast of", "requests", "median error", "P90 error", "bias"), rows)


def run_of_load(name: str, results: Sequence[RequestResult], notes: Sequence[str] = ()) -> ServedRun:
    """Take the results of a load test, whose times count from when requests were due."""
    arrival_s = _column([one.plan.due_s + one.retried_after_s for one in results])
    e2e_s = _column([one.e2e_s if one.failure is None else None for one in results])
    return ServedRun(
        name=name,
        instance=np.array([one.instance or "endpoint" for one in results]),
        arrival_s=arrival_s,
        scheduled_s=np.full(len(results), np.nan),
        finished_s=arrival_s + e2e_s,
        ttft_s=_column([one.ttft_s for one in results]),
        tpot_s=_column([one.tpot_s for one in results]),
        e2e_s=e2e_s,
        predicted_ttft_s=_column([one.predicted_ttft_s for one in results]),
        predicted_e2e_s=_column([one.predicted_e2e_s for one in results]),
        notes=notes,
    )


def run_of_simulation(result: RunResult, notes: Sequence[str] = ()) -> ServedRun:
    """Take a simulated run."""
    table = request_table(result)
    names = ("arrival_s", "scheduled_s", "finished_s", "ttft_s", "tpot_s", "e2e_s", "predicted_ttft_s",
             "predicted_e2e_s")  # fmt: skip
    columns = {name: np.asarray(table[name], np.float64) for name in names}
    return ServedRun(name=result.policy, instance=table["instance"], notes=notes, **columns)


def run_of_replay(name: str, outcomes: Sequence[Outcome], notes: Sequence[str] = ()) -> ServedRun:
    """Take the requests that one simulated engine served."""
    names = ("arrival_s", "scheduled_s", "finished_s", "ttft_s", "tpot_s", "e2e_s")
    columns = {name: _column([getattr(one, name) for one in outcomes]) for name in names}
    unknown = np.full(len(outcomes), np.nan)
    return ServedRun(
        name=name,
        instance=np.array(["engine"] * len(outcomes)),
        predicted_ttft_s=unknown,
        predicted_e2e_s=unknown,
        notes=notes,
        **columns,
    )


def _column(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], np.float64)
