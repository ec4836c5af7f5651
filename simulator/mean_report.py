"""The mean of what was attained in several runs: by all requests, and by priority, class, tier, entry and tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predictor.gain import NO_TIER

GROUPS = ("priority", "class", "tier", "mix", "tenant")


def mean_report(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average reports of `attainment_report`, number by number; runs where a number is None or missing do not count."""
    names = dict.fromkeys(name for report in reports for name in report)
    return {name: _mean([report[name] for report in reports if name in report]) for name in names}


def _mean(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], Mapping):
        return mean_report(known)
    if isinstance(known[0], list):
        return [_mean(parts) for parts in zip(*known, strict=False)]
    return float(np.mean(known))


def group_shares(report: Mapping[str, Any]) -> dict[str, float | None]:
    """Return which share of each group has all tokens by their deadlines; groups of only one part are left out."""
    shares: dict[str, float | None] = {}
    for group in GROUPS:
        parts = report.get(f"by_{group}", {})
        if len(parts) > 1:
            shares |= {_title(group, name): part["deadline_attained"] for name, part in parts.items()}
    return shares


def _title(group: str, name: str) -> str:
    return f"tier {1000 * float(name):g} ms" if group == "tier" and name != NO_TIER else f"{group} {name}"
