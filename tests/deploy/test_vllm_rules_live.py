"""A real vLLM engine with a batching rule serves the same texts as one without."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compare_vllm_rules import compared
from tests.deploy.engines import need_vllm

pytestmark = pytest.mark.vllm

MOST = 0.5  # of the texts


def test_a_rule_changes_no_text(tmp_path: Path) -> None:
    """Texts are equal; those of prompts with another first token never are, so equal texts say something.

    On some processors an engine without a rule does not always repeat its own texts either: there a few differ.
    """
    need_vllm()
    results = {
        one["name"]: one["value"] for one in compared(tmp_path, "slide_batching", num_requests=12, seed=1, budget_s=0.0)
    }
    assert results["same_text"] >= MOST
    assert results["control_same_text"] == 0.0
