"""Simulated clusters run with interpreted kernels too, for a debugger, and with the same results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.python_process import run_python

COMMAND = (
    "simulate", "--json", "--policy", "block", "--policy", "marginal: lambda = 1", "--num-requests", "6",
    "--instances", "2", "--rate", "20", "--prompt-tokens", "40", "--output-tokens", "8", "--tags", "exact",
)  # fmt: skip


def result(*, interpreted: bool) -> Any:
    """Run the command."""
    return json.loads(run_python("-m", "services.cli", *COMMAND, interpreted=interpreted))


def latencies(value: Any) -> list[float]:
    """Return all numbers of a result, in their order, but for how long it took."""
    if isinstance(value, dict):
        return [one for name, inner in value.items() if not name.startswith("wall") for one in latencies(inner)]
    if isinstance(value, list):
        return [one for inner in value for one in latencies(inner)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.slow
def test_forecasts_of_simulated_clusters_are_interpreted() -> None:
    """Policies that read forecasts, and delays of other requests."""
    compiled, interpreted = (latencies(result(interpreted=one)) for one in (False, True))
    assert len(compiled) > 20
    assert interpreted == pytest.approx(compiled, rel=1e-9, abs=1e-9)
