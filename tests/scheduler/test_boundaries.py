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
MODULES = {
    "scheduler.admission.queue": "the admission queue",
    "scheduler.hotspots": "ranking",
    "scheduler.shortlist": "the shortlist",
}
OUTSIDE = ("services", "simulator")
# They sort blocks, requests, times or the tokens of experts.
SORT_OTHER_THINGS = {
    "services/engine_state/snapshot.py",
    "services/profiling/torch_experts.py",
    "simulator/accuracy/online_correction.py",
    "simulator/accuracy/request_errors.py",
    "simulator/accuracy/window.py",
    "simulator/run_page.py",
    "simulator/timeline.py",
    "simulator/workload.py",
}


def sources() -> list[Path]:
    """The modules of all drivers, and whatever they may use."""
    files = [path for folder in OUTSIDE for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in files if str(path.relative_to(ROOT)) not in SORT_OTHER_THINGS]


def used(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """What a module uses of what belongs to the core: line, name and concern."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            yield node.lineno, node.func.attr, METHODS[node.func.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("scheduler"):
            for name in (one.name for one in node.names):
                if concern := NAMES.get(name) or MODULES.get(node.module or ""):
                    yield node.lineno, name, concern


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
    assert all((ROOT / f"{module.replace('.', '/')}.py").is_file() for module in MODULES)
    imports = "from scheduler.candidate import delayed\nfrom scheduler.shortlist import drawn\n"
    snippet = f"{imports}position = policy.best(candidates, scores)"
    assert [name for _, name, _ in used(ast.parse(snippet))] == ["delayed", "drawn", "best"]
