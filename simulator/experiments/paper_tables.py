"""What the paper has, beside what was measured, and where curves turn up, as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from simulator.experiments.claims import Claim, ClaimResult
from simulator.experiments.experiment import Experiment
from simulator.experiments.findings import Findings, slug
from simulator.experiments.metric_titles import number_of, rounded, title_of

SHARES = ("e2e_error_mean", "e2e_error_p50", "best_share", "first_three_share", "hit_ratio")


def claims_table(findings: Findings) -> str:
    """Put what the paper claims beside what was measured."""
    lines = ["| the paper | its figure | here |", "|---|---|---|"]
    lines += [f"| {claim.says} | {claim.paper} | {_here(claim, here)} |" for claim, here in findings.claims]
    return "\n".join(lines)


def _here(claim: Claim, here: Sequence[ClaimResult]) -> str:
    """Write what was measured, each with where that was, unless there is but one; equal ones together."""
    several_settings = len({one.setting for one in here}) > 1
    several_rates = len({one.rate for one in here}) > 1
    texts: list[str] = []
    for (setting, what), group in groupby(here, lambda one: (one.setting, _seen(claim, one))):
        rates = ", ".join(f"{one.rate:g}" for one in group) + "/s" if several_rates else ""
        place = f"{setting if several_settings else ''} {rates}".strip()
        texts.append(f"{place}: {what}" if place else what)
    return "; ".join(texts) or "not measured"


def _seen(claim: Claim, one: ClaimResult) -> str:
    if one.name:
        return one.name
    if claim.over or claim.metric in SHARES:
        sign = "+" if claim.over else ""
        return f"{100 * one.value:{sign}.0f} %" + ("" if one.half is None else f" ± {100 * one.half:.0f}")
    return rounded(one.value, one.half)


def turning_tables(experiment: Experiment, findings: Findings) -> list[str]:
    """Say where curves turn up, in the order in which they do."""
    if experiment.turn is None:
        return []
    by_name = {row.name: row for row in findings.rows}
    tables = []
    for setting in experiment.settings:
        limit = f"{title_of(experiment.turn.metric)}, reaches {experiment.turn.limit:g}"
        lines = [f"| {limit} · {setting.name} | at requests/s |", "|---|---|"]
        known = {one.name: by_name.get(f"turns_at_qps.{slug(one.name)}.{setting.name}")
                 for one, _ in experiment.cases(setting)}  # fmt: skip
        first = sorted(known.items(), key=lambda item: item[1].value if item[1] else float("inf"))
        lines += [f"| {name} | {number_of(row) if row else f'beyond {setting.rates[-1]:g}'} |" for name, row in first]
        tables.append("\n".join(lines))
    return tables
