"""Where `make dashboards` puts Prometheus, and how its tests run it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus"
RULE_FILES = (RULES / "recording.yml", RULES / "alerts.yml")


def program(name: str) -> str:
    """Return the path of a program; the test is skipped where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=ROOT / "build" / "prometheus")
    if found is None:
        pytest.skip(f"{name} is not installed (make dashboards)")
    return found


def promtool(*words: str) -> str:
    """Run promtool; a refusal fails the test with its output."""
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
