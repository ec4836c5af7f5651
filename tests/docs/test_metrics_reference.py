"""The page of metrics is what the code registers."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.docs.pages import ROOT

SCRIPT = ROOT / "scripts" / "generate_metrics_reference.py"
NOT_METRICS = {"block_size", "block_tag_spread", "block_tag_tokens", "block_tokens"}  # other names in quotes


def test_the_page_is_up_to_date() -> None:
    """It is generated, and was generated after the last change of a metric."""
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_metric_is_missing() -> None:
    """Every name in the services that looks like a metric's is on the page, with the suffix of its kind."""
    page = set(re.findall(r"`(block_\w+)`", (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")))
    for path in sorted((ROOT / "services").rglob("*metrics.py")):
        for name in re.findall(r'"(block_[a-z0-9_]+)"', path.read_text(encoding="utf-8")):
            assert name in NOT_METRICS or {name, f"{name}_total"} & page, f"{path.name}: {name}"
