"""Nothing about how a decision is made exists outside `scheduler/`: drivers carry out what the core says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Where a decision is made: what is filtered and ranked, what is tried next, who waits and for how long.
METHODS = {
    "among": "the shortlist",
    "scores": "ranking",
    "best": "ranking",
    "choose": "ranking",
    "admits": "the hold condition",
    "worth_asking": "the hold condition",
    "must_leave": "the admission queue",
    "unhealthy": "health",
    "rows_without": "health",
    "since": "corrections for reservations",
    "argsort": "ranking",
    "lexsort": "ranking",
}
NAMES = {
    "fallback_key": "the fallback order",
    "FALLBACK_ORDER": "the fallback order",
    "delayed": "corrections for reservations",
    "delay_of_reservation_s": "corrections for reservations",
    "forecast_columns": "ranking",
    "lowest": "the shortlist",
    "AdmissionQueue": "the admission queue",
    "RecentRefusals": "the hold condition",
    "retry_pause_s": "the admission queue",
    "PrefixIndex": "prefix look-ups",
    "ReservationVersions": "reservations",
}
DRIVERS = ("services/placement", "services/scheduler_server", "services/gateway", "simulator")
NO_DRIVERS = {  # they make workloads, and analyse results
    "simulator/workload.py",
    "simulator/placement_bound.py",
    "simulator/forecast_accuracy.py",
    "simulator/pooled_bound.py",
}


def sources() -> list[Path]:
    """The modules of all drivers."""
    files = [path for folder in DRIVERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if str(path.relative_to(ROOT)) not in NO_DRIVERS]


def used(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """What a module uses of what belongs to the core: line, name and concern."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            yield node.lineno, node.func.attr, METHODS[node.func.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scheduler"):
            for name in (one.name for one in node.names):
                if name in NAMES:
                    yield node.lineno, name, NAMES[name]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_driver_decides_nothing(path: Path) -> None:
    """It ranks no instances, keeps no queue, and knows no order of fallbacks."""
    found = [
        f"{path.name}:{line}: {name} ({concern})" for line, name, concern in used(ast.parse(path.read_text("utf-8")))
    ]
    assert not found, f"belongs to scheduler/: {found}"


def test_what_belongs_to_the_core_is_found_there() -> None:
    """A name that was changed there is changed in the lists above, too."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "scheduler").rglob("*.py"))]
    for name in (*METHODS, *NAMES):
        assert any(name in text for text in texts), name
    snippet = "from scheduler.candidate import delayed\nposition = policy.best(candidates, scores)"
    assert [name for _, name, _ in used(ast.parse(snippet))] == ["delayed", "best"]
