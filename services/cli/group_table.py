"""What the groups of a mix attained, as a table for people: by priority, class, tier, entry and tenant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from simulator.mean_report import group_shares

WIDTH = 20


def group_table(title: str, reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a row for each group and a column for each report; nothing where no report has several groups."""
    shares = {name: group_shares(report) for name, report in reports.items()}
    groups = list(dict.fromkeys(group for of in shares.values() for group in of))
    if not groups:
        return
    width = max(10, *map(len, groups))
    yield title
    yield " " * width + "".join(f"  {name:>{_cell(name)}}" for name in reports)
    for group in groups:
        cells = ((name, of.get(group)) for name, of in shares.items())
        yield f"{group:{width}}" + "".join(
            f"  {'-' if share is None else f'{share:.1%}':>{_cell(name)}}" for name, share in cells
        )


def _cell(name: str) -> int:
    return max(WIDTH - 2, len(name))
