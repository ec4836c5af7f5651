"""A real vLLM engine with a batching rule serves the same texts as one without."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compare_vllm_rules import compared
from tests.deploy.engines import need_vllm

pytestmark = pytest.mark.vllm


def test_a_rule_changes_no_text(tmp_path: Path) -> None:
    """All texts are equal; texts of prompts with another first token are not, so equal texts say something."""
    need_vllm()
    results = {
        one["name"]: one["value"] for one in compared(tmp_path, "slide_batching", num_requests=12, seed=1, budget_s=0.0)
    }
    assert results["same_text"] == 1.0
    assert results["control_same_text"] == 0.0
