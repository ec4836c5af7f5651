"""Simulated clusters run with interpreted kernels too, for a debugger, and with the same results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = (
    "simulate", "--json", "--policy", "block", "--policy", "marginal: lambda = 1", "--num-requests", "6",
    "--instances", "2", "--rate", "20", "--prompt-tokens", "40", "--output-tokens", "8", "--tags", "exact",
)  # fmt: skip


def result(**environment: str) -> Any:
    """Run the command in a process of its own."""
    made = subprocess.run(
        [sys.executable, "-m", "services.cli", *COMMAND],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout)


def latencies(value: Any) -> list[float]:
    """Return all numbers of a result, in their order, but for how long it took."""
    if isinstance(value, dict):
        return [one for name, inner in value.items() if not name.startswith("wall") for one in latencies(inner)]
    if isinstance(value, list):
        return [one for inner in value for one in latencies(inner)]
    return [value] if isinstance(value, int | float) else []


def test_forecasts_of_simulated_clusters_are_interpreted() -> None:
    """Policies that read forecasts, and delays of other requests."""
    compiled, interpreted = latencies(result()), latencies(result(NUMBA_DISABLE_JIT="1"))
    assert len(compiled) > 20
    assert interpreted == pytest.approx(compiled, rel=1e-9, abs=1e-9)
