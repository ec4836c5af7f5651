"""Reports of experiments: JSON, Markdown tables, and one self-contained HTML page."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Any

from simulator.capacity import half_width
from simulator.experiments.autoscaling_shapes import NUMBERS, OVER_TIME
from simulator.experiments.charts import dot_chart, line_chart
from simulator.experiments.claims import Claim, ClaimResult
from simulator.experiments.experiment import Experiment
from simulator.experiments.experiment_metrics import CAPACITY, GOODPUT, PROVISIONING
from simulator.experiments.findings import BOUND, URGENCY_OVER_TIME, Findings, Row, slug
from simulator.experiments.goodput_comparison import goodput_tables
from simulator.report_page import html_page, html_table
from simulator.scenario import as_table

LOGARITHMIC = ("ttft", "e2e_p99", "preemptions", "worst_ttft")
OVER_TIMES = (OVER_TIME, URGENCY_OVER_TIME)  # curves over seconds, too long for a table
SHARES = (
    "tdg_ratio",
    "slo_attained",
    "deadline_attained",
    "rt_ttft_attained",
    "rt_tpot_attained",
    "e2e_error_mean",
    "e2e_error_p50",
    "best_share",
    "first_three_share",
    "hit_ratio",
)
TITLES = {
    "ttft_mean_s": "mean TTFT, s",
    "ttft_p99_s": "P99 TTFT, s",
    "tpot_mean_s": "mean TPOT, s",
    "tpot_p99_s": "P99 TPOT, s",
    "e2e_mean_s": "mean e2e, s",
    "e2e_p99_s": "P99 e2e, s",
    "requests_per_s": "throughput, requests/s",
    "capacity": "capacity, requests/s",
    "goodput": "goodput, requests/s",
    "free_blocks_mean": "free blocks, mean",
    "free_blocks_variance": "free blocks, variance between instances",
    "hit_ratio": "share of prompt tokens found cached",
    "prefill_imbalance": "prefill time of the busiest instance over the mean, minus 1",
    "e2e_error_mean": "error of predicted e2e, mean",
    "e2e_error_p50": "error of predicted e2e, median",
    "best_share": "how often the instance with the best forecast was the best",
    "first_three_share": "how often it was among the best three",
    "rank_mean": "its mean rank",
    "tdg_ratio": "TDG ratio",
    "slo_attained": "SLO attainment",
    "deadline_attained": "requests all of whose tokens came in time",
    "instance_s_per_request": "instance-seconds per request",
    "num_instances": "instances, mean",
    "attained": "share of the requests that attain their deadlines",
    "attained_tokens": "share of the tokens in such requests",
    "worst_ttft_over_target": "longest TTFT, as a multiple of its target",
    "tdg_ratio_priority_0": "TDG ratio of priority 0",
    "tdg_ratio_priority_1": "TDG ratio of priority 1",
    "slo_attained_priority_0": "SLO attainment of priority 0",
    "slo_attained_priority_1": "SLO attainment of priority 1",
    **{
        f"{name}_p{share}_s_priority_{priority}": f"{text} {name.upper()} of priority {priority}, s"
        for name in ("ttft", "tpot")
        for share, text in ((50, "median"), (99, "P99"))
        for priority in (0, 1)
    },
    "num_urgent": "urgent requests, mean",
    "num_normal": "normal requests, mean",
    "urgent_share": "share of urgent requests, mean",
    "slo_attained_shortest_quarter": "SLO attainment of the shortest quarter of the prompts",
    "slo_attained_longest_quarter": "SLO attainment of the longest quarter of the prompts",
}


def as_json(experiment: Experiment, findings: Findings) -> dict[str, Any]:
    """Return all numbers by name."""
    machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}
    return {
        "bench": experiment.name,
        "machine": machine,
        "results": [
            {"name": row.name, "value": row.value, "unit": row.unit, "n": row.n, "ci95": row.ci95}
            for row in findings.rows
        ],
    }


def as_markdown(experiment: Experiment, findings: Findings) -> str:
    """Return the tables, beside the paper's results, and the differences in conditions."""
    parts = [f"# {experiment.title}", experiment.about.strip()]
    if findings.claims:
        parts += ["## Compared with the paper", claims_table(experiment, findings), "## Measured"]
    parts += _tables(experiment, findings)
    parts += rival_tables(experiment, findings)
    if experiment.differences:
        parts.append(f"## {differences_of(experiment)}")
        parts.append("\n".join(f"- {line}" for line in experiment.differences))
    parts.append(seeds_of(experiment))
    parts.append(f"`block experiment {experiment.name}`")
    return "\n\n".join(part for part in parts if part) + "\n"


def seeds_of(experiment: Experiment) -> str:
    """Describe the number of seeds and the intervals."""
    if experiment.seeds == 1:
        return "One seed: the difference between seeds is not known."
    return f"{experiment.seeds} seeds; ± is half a 95 % confidence interval over them (Student's t)."


def differences_of(experiment: Experiment) -> str:
    """Return the heading of the list of conditions."""
    has_paper = experiment.paper or experiment.claims or experiment.kind == PROVISIONING
    return "Where conditions differ from the paper's" if has_paper else "Conditions"


def as_html(experiment: Experiment, findings: Findings) -> str:
    """Return a page with charts, tables and the settings."""
    body = [f"<h1>{escape(experiment.title)}</h1>"]
    body += [f"<p>{_html_text(paragraph)}</p>" for paragraph in experiment.about.strip().split("\n\n")]
    if findings.claims:
        body += ["<h2>Compared with the paper</h2>", html_table(claims_table(experiment, findings))]
        body.append("<h2>Measured</h2>")
    body += [f"<figure>{chart}</figure>" for chart in _charts(experiment, findings) if chart]
    body += [html_table(table) for table in (*_tables(experiment, findings), *rival_tables(experiment, findings))]
    if experiment.differences:
        items = "".join(f"<li>{_html_text(line)}</li>" for line in experiment.differences)
        body.append(f"<h2>{differences_of(experiment)}</h2><ul>{items}</ul>")
    marks = " Open circles are the paper's values." if experiment.paper else ""
    body.append(f"<p>{seeds_of(experiment)}{marks} <code>block experiment {escape(experiment.name)}</code></p>")
    settings = {setting.name: as_table(setting.scenario) for setting in experiment.settings}
    body.append(f"<details><summary>Settings</summary><pre>{escape(json.dumps(settings, indent=1))}</pre></details>")
    return html_page(experiment.title, body)


def claims_table(experiment: Experiment, findings: Findings) -> str:
    """Return the paper's claims beside our measurements, as Markdown."""
    loads = experiment.settings[0].saturated_rate is not None
    lines = ["| the paper | its figure | here |", "|---|---|---|"]
    lines += [
        f"| {claim.text} | {claim.paper} | {_measured(claim, results, loads)} |" for claim, results in findings.claims
    ]
    return "\n".join(lines)


def _measured(claim: Claim, results: Sequence[ClaimResult], loads: bool) -> str:
    """Return the measurements for a claim, with setting and rate if there are several; equal ones are joined."""
    several_settings = len({one.setting for one in results}) > 1
    several_rates = len({one.rate for one in results}) > 1
    texts: list[str] = []
    for (setting, value), group in groupby(results, lambda one: (one.setting, _claim_value(claim, one))):
        rates = ", ".join(f"{one.rate:g}" for one in group) + ("" if loads else "/s") if several_rates else ""
        where = f"{setting if several_settings else ''} {rates}".strip()
        texts.append(f"{where}: {value}" if where else value)
    return "; ".join(texts) or "not measured"


def _claim_value(claim: Claim, one: ClaimResult) -> str:
    if one.name:
        return one.name
    if claim.over or claim.metric in SHARES:
        sign = "+" if claim.over else ""
        return f"{100 * one.value:{sign}.0f} %" + ("" if one.half is None else f" ± {100 * one.half:.0f}")
    return rounded(one.value, one.half)


def turning_tables(experiment: Experiment, findings: Findings) -> list[str]:
    """Return the turning points of the curves of each setting, in ascending order, as Markdown."""
    if experiment.turn is None:
        return []
    by_name = {row.name: row for row in findings.rows}
    tables = []
    for setting in experiment.settings:
        limit = f"{title_of(experiment.turn.metric)}, reaches {experiment.turn.limit:g}"
        lines = [f"| {limit} · {setting.name} | at requests/s |", "|---|---|"]
        rows = {one.name: by_name.get(f"turns_at_qps.{slug(one.name)}.{setting.name}")
                for one, _ in experiment.cases(setting)}  # fmt: skip
        ordered = sorted(rows.items(), key=lambda item: item[1].value if item[1] else float("inf"))
        lines += [f"| {name} | {number_of(row) if row else f'beyond {setting.rates[-1]:g}'} |" for name, row in ordered]
        tables.append("\n".join(lines))
    return tables


def rival_tables(experiment: Experiment, findings: Findings) -> list[str]:
    """Return, for each setting, the best rival at each rate and how far the others are above it, as Markdown."""
    tables = []
    for setting, group in groupby(findings.best_rivals, lambda one: one.setting):
        here = list(group)
        names = list(dict.fromkeys(name for one in here for name in one.differences))
        title = f"{title_of(experiment.rival_metric)}, above the best rival · {setting}"
        lines = [f"| {title} | best rival | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
        for one in here:
            cells = [_difference(one.differences.get(name, ())) for name in names]
            lines.append(f"| {one.rate:g} | {one.name} {rounded(one.value)} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return tables


def _difference(values: Sequence[float]) -> str:
    if not values:
        return ""
    half = f" ± {half_width(values):.3f}" if len({*values}) > 1 else ""
    return f"{sum(values) / len(values):+.3f}{half}"


def _charts(experiment: Experiment, findings: Findings) -> list[str]:
    charts = []
    for metric, settings in findings.curves.items():
        for setting, curves in settings.items():
            title = f"{title_of(metric)} · {setting}"
            if metric in OVER_TIMES:
                charts.append(line_chart(title, "s", curves, marks=False))
            elif experiment.kind == CAPACITY:
                values = {name: (curve[0][1], curve[0][2]) for name, curve in curves.items()}
                charts.append(dot_chart(title, values, experiment.paper.get(setting)))
            elif all(len(curve) == 1 for curve in curves.values()):
                charts.append(dot_chart(title, {name: (curve[0][1], curve[0][2]) for name, curve in curves.items()}))
            else:
                loads = experiment.settings[0].saturated_rate is not None
                axis = "load" if loads else "requests per second"
                charts.append(line_chart(title, axis, curves, log=metric.startswith(LOGARITHMIC)))
    return charts


def _tables(experiment: Experiment, findings: Findings) -> list[str]:
    if experiment.kind == GOODPUT:
        return goodput_tables(experiment, findings.goodput, findings.bounds)
    kinds = {CAPACITY: _capacity_tables, PROVISIONING: _provisioning_tables}
    tables = kinds.get(experiment.kind, _sweep_tables)(experiment, findings)
    return turning_tables(experiment, findings) + tables


def _provisioning_tables(experiment: Experiment, findings: Findings) -> list[str]:
    by_name = {row.name: row for row in findings.rows}
    tables = []
    for setting in experiment.settings:
        head = " | ".join(number.replace("_", " ") for number in NUMBERS)
        lines = [f"| {setting.name} | {head} |", "|---" * (len(NUMBERS) + 1) + "|"]
        for rule in experiment.rules:
            rows = [by_name[f"{number}.{rule}.{setting.name}"] for number in NUMBERS]
            lines.append(f"| {rule} | {' | '.join(_rounded(row) for row in rows)} |")
        tables.append("\n".join(lines))
    in_tables = {row.name for number in NUMBERS for row in findings.rows if row.name.startswith(f"{number}.")
             and row.unit != "ratio"}  # fmt: skip
    lines = ["| compared | | |", "|---|---|---|"]
    lines += [f"| {row.name} | {_rounded(row)} | {row.unit} |" for row in findings.rows if row.name not in in_tables]
    return [*tables, "\n".join(lines)]


def _rounded(row: Row) -> str:
    digits = 3 if row.unit == "ratio" else 1
    return f"{row.value:,.{digits}f}" + (f" ± {row.ci95:,.{digits}f}" if row.ci95 is not None else "")


def _capacity_tables(experiment: Experiment, findings: Findings) -> list[str]:
    by_name = {row.name: row for row in findings.rows}
    tables = []
    for setting in experiment.settings:
        baseline = experiment.baseline_of(setting)
        names = [variant.name for variant, _ in experiment.cases(setting)] + [BOUND] * experiment.bound
        paper = _paper_cells(experiment, setting.name, baseline)
        head = ["requests/s", f"over {baseline}", *(["paper", f"paper, over {baseline}"] if paper else [])]
        lines = [f"| {setting.name} | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
        for name in names:
            key = f"{slug(name)}.{setting.name}"
            share = by_name.get(f"gain_over_{slug(baseline)}.{key}")
            cells = [
                number_of(by_name[f"capacity_qps.{key}"]),
                _share(share),
                *(paper.get(name, ("", "")) if paper else ()),
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return tables


def _paper_cells(experiment: Experiment, setting: str, baseline: str) -> dict[str, tuple[str, str]]:
    """Return the paper's capacities and its gains over the baseline, as far as it has them."""
    capacities = experiment.paper.get(setting, {})
    gains = dict(experiment.paper_gains.get(setting, {}))
    if baseline in capacities:
        gains |= {name: one / capacities[baseline] - 1 for name, one in capacities.items() if name != baseline}
    return {
        name: (f"{capacities[name]:g}" if name in capacities else "", f"{gains[name]:+.1%}" if name in gains else "")
        for name in (*capacities, *(name for name in gains if name not in capacities))
    }


def _sweep_tables(_: Experiment, findings: Findings) -> list[str]:
    tables = []
    for metric, settings in findings.curves.items():
        if metric in OVER_TIMES:
            continue
        for setting, curves in settings.items():
            xs = sorted({x for curve in curves.values() for x, _, _ in curve})
            columns = [f"{x:g}" if len(xs) > 1 or x else "" for x in xs]
            lines = [f"| {title_of(metric)} · {setting} | {' | '.join(columns)} |", "|---" * (len(xs) + 1) + "|"]
            for name, curve in curves.items():
                at = {x: (y, half) for x, y, half in curve}
                cells = [rounded(at[x][0], at[x][1] or None) if x in at else "" for x in xs]
                lines.append(f"| {name} | {' | '.join(cells)} |")
            tables.append("\n".join(lines))
    return tables


def _share(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.value:+.1%}" + ("" if row.ci95 is None else f" ± {row.ci95:.1%}")


def title_of(metric: str) -> str:
    """Return a metric's title for tables and charts."""
    return TITLES.get(metric, metric.replace("_", " "))


def number_of(row: Row) -> str:
    """Format a number with its interval."""
    return f"{row.value:.2f}" + ("" if row.ci95 is None else f" ± {row.ci95:.2f}")


def rounded(value: float, half: float | None = None) -> str:
    """Format a number with as many digits as its interval makes significant, or three."""
    size = abs(half or 0.0) / 10 or abs(value) / 100 or 1.0
    decimals = max(0, min(6, -math.floor(math.log10(size) + 1e-9)))
    return f"{value:.{decimals}f}" + ("" if half is None else f" ± {half:.{decimals}f}")


def _html_text(text: str) -> str:
    """Convert the emphasis and code marks of Markdown to HTML."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*(\w[^*<>]*)\*", r"<em>\1</em>", text)
