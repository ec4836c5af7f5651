"""What an experiment came to, as JSON, Markdown, and one HTML file that needs no other."""

from __future__ import annotations

import json
import platform
import re
from html import escape
from pathlib import Path
from typing import Any

from simulator.experiments.autoscaling_shapes import NUMBERS, OVER_TIME
from simulator.experiments.charts import dot_chart, line_chart
from simulator.experiments.experiment import CAPACITY, PROVISIONING, Experiment
from simulator.experiments.findings import BOUND, Findings, Row, slug
from simulator.experiments.metric_titles import number_of, rounded, title_of
from simulator.experiments.paper_tables import claims_table, turning_tables
from simulator.scenario import as_table

STYLE = (
    "body{font-family:sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}figure{display:inline-block;margin:.4rem}pre{background:#f6f6f6;"
    "padding:.6rem;overflow:auto}"
)
LOGARITHMIC = ("ttft", "e2e_p99", "preemptions")


def as_json(experiment: Experiment, findings: Findings) -> dict[str, Any]:
    """Give every number by its name."""
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
    """Write tables beside the paper's, and what differs."""
    parts = [f"# {experiment.title}", experiment.about.strip()]
    if findings.claims:
        parts += ["## Beside the paper", claims_table(findings), "## Measured"]
    parts += _tables(experiment, findings)
    if experiment.differences:
        parts.append(f"## {differences_of(experiment)}")
        parts.append("\n".join(f"- {line}" for line in experiment.differences))
    parts.append(seeds_of(experiment))
    parts.append(f"`block experiment {experiment.name}`")
    return "\n\n".join(part for part in parts if part) + "\n"


def seeds_of(experiment: Experiment) -> str:
    """Say what numbers rest on."""
    if experiment.seeds == 1:
        return "One seed: how much another would differ is not known."
    return f"{experiment.seeds} seeds; ± is half a 95 % confidence interval over them (Student's t)."


def differences_of(experiment: Experiment) -> str:
    """Head the conditions: an experiment that no paper has differs from none."""
    has_paper = experiment.paper or experiment.claims or experiment.kind == PROVISIONING
    return "Where conditions differ from the paper's" if has_paper else "What this rests on"


def as_html(experiment: Experiment, findings: Findings) -> str:
    """Write a page with plots, tables and the settings."""
    body = [f"<h1>{escape(experiment.title)}</h1>"]
    body += [f"<p>{_html_text(paragraph)}</p>" for paragraph in experiment.about.strip().split("\n\n")]
    if findings.claims:
        body += ["<h2>Beside the paper</h2>", _html_table(claims_table(findings)), "<h2>Measured</h2>"]
    body += [f"<figure>{chart}</figure>" for chart in _charts(experiment, findings) if chart]
    body += [_html_table(table) for table in _tables(experiment, findings)]
    if experiment.differences:
        items = "".join(f"<li>{_html_text(line)}</li>" for line in experiment.differences)
        body.append(f"<h2>{differences_of(experiment)}</h2><ul>{items}</ul>")
    marks = " Open circles are the paper's." if experiment.paper else ""
    body.append(f"<p>{seeds_of(experiment)}{marks} <code>block experiment {escape(experiment.name)}</code></p>")
    settings = {setting.name: as_table(setting.scenario) for setting in experiment.settings}
    body.append(f"<details><summary>Settings</summary><pre>{escape(json.dumps(settings, indent=1))}</pre></details>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(experiment.title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def write(experiment: Experiment, findings: Findings, folder: Path) -> None:
    """Write all three into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(as_json(experiment, findings), indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(as_markdown(experiment, findings), encoding="utf-8")
    (folder / "report.html").write_text(as_html(experiment, findings), encoding="utf-8")


def _charts(experiment: Experiment, findings: Findings) -> list[str]:
    charts = []
    for metric, settings in findings.curves.items():
        for setting, curves in settings.items():
            title = f"{title_of(metric)} · {setting}"
            if metric == OVER_TIME:
                charts.append(line_chart(title, "s", curves, marks=False))
            elif experiment.kind == CAPACITY:
                values = {name: (curve[0][1], curve[0][2]) for name, curve in curves.items()}
                charts.append(dot_chart(title, values, experiment.paper.get(setting)))
            elif all(len(curve) == 1 for curve in curves.values()):
                charts.append(dot_chart(title, {name: (curve[0][1], curve[0][2]) for name, curve in curves.items()}))
            else:
                charts.append(
                    line_chart(title, "requests per second", curves, log=metric.startswith(LOGARITHMIC))
                )  # fmt: skip
    return charts


def _tables(experiment: Experiment, findings: Findings) -> list[str]:
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
    named = {row.name for number in NUMBERS for row in findings.rows if row.name.startswith(f"{number}.")
             and row.unit != "ratio"}  # fmt: skip
    lines = ["| compared | | |", "|---|---|---|"]
    lines += [f"| {row.name} | {_rounded(row)} | {row.unit} |" for row in findings.rows if row.name not in named]
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
        theirs = _papers(experiment, setting.name, baseline)
        head = ["requests/s", f"over {baseline}", *(["paper", f"paper, over {baseline}"] if theirs else [])]
        lines = [f"| {setting.name} | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
        for name in names:
            key = f"{slug(name)}.{setting.name}"
            share = by_name.get(f"gain_over_{slug(baseline)}.{key}")
            cells = [
                number_of(by_name[f"capacity_qps.{key}"]),
                _share(share),
                *(theirs.get(name, ("", "")) if theirs else ()),
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        tables.append("\n".join(lines))
    return tables


def _papers(experiment: Experiment, setting: str, baseline: str) -> dict[str, tuple[str, str]]:
    """Write the paper's capacities, and its gains over the baseline, where it has them."""
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
        for setting, curves in settings.items():
            xs = sorted({x for curve in curves.values() for x, _, _ in curve})
            named = [f"{x:g}" if len(xs) > 1 or x else "" for x in xs]
            lines = [f"| {title_of(metric)} · {setting} | {' | '.join(named)} |", "|---" * (len(xs) + 1) + "|"]
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


def _html_text(text: str) -> str:
    """Turn what Markdown would emphasize, or show as code, into HTML."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*(\w[^*<>]*)\*", r"<em>\1</em>", text)


def _html_table(markdown: str) -> str:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    head, _, *rest = rows
    text = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rest)
    return f"<table><tr>{text}</tr>{lines}</table>"
