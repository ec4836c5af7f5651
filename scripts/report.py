"""The results of a bench: one JSON object, or a line for each result."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any


def machine() -> dict[str, object]:
    """Describe this machine."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def row(name: str, value: float, unit: str, n: int) -> dict[str, Any]:
    """Return one result."""
    return {"name": name, "value": float(value), "unit": unit, "n": n}


def report(bench: str, results: Sequence[Mapping[str, object]], *, as_json: bool, **more: object) -> None:
    """Print one JSON object, or a line for each result."""
    if as_json:
        print(json.dumps({"bench": bench, "machine": machine(), **more, "results": results}))
        return
    for result in results:
        print(f"{result['name']:44}{result['value']:>12.3f} {result['unit']:12} n={result['n']}")
