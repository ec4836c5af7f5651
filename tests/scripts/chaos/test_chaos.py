"""A short chaos run: every request is answered, as one engine would have answered it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.chaos.plan import ChaosSettings, plan_of

COMMAND = [sys.executable, "-m", "scripts.chaos"]


def test_the_plan_is_printed() -> None:
    """As lines of JSON; nothing is run."""
    command = [*COMMAND, "--print-plan", "--minutes", "2", "--seed", "3"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    planned = plan_of(ChaosSettings(minutes=2, seed=3))
    assert [(one["at_s"], one["kind"], one["part"]) for one in printed] == [
        (one.at_s, one.kind, one.part) for one in planned
    ]


def test_a_setting_that_cannot_be_run_is_named() -> None:
    """In one line, and nothing is run."""
    done = subprocess.run([*COMMAND, "--rate", "0"], check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "rate: must be a number above 0" in done.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("cluster")
def test_a_short_plan(tmp_path: Path) -> None:
    """Parts are killed, stopped, slowed and cut off; nothing is lost, and nothing stays reserved."""
    file = tmp_path / "report.json"
    command = [*COMMAND, "--json", "--minutes", "0.5", "--every", "4", "--engines", "3", "--schedulers", "2"]
    command += ["--rate", "5", "--tokens", "120", "--seed", "4", "--report", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["results"] == json.loads(file.read_text())["results"]
    rows = {row["name"]: row["value"] for row in report["results"]}
    assert rows["requests.complete"] > 60
    assert sum(value for name, value in rows.items() if name.startswith("faults.")) >= 8
    assert rows["outcomes.outcome recorded"] > rows["requests.complete"] / 2
