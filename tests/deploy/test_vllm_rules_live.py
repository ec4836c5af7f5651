"""A real vLLM engine with a batching rule serves the same texts as one without."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compare_vllm_rules import TIE_NATS, Choice, compared, make_same_choices
from tests.deploy.engines import need_vllm


@pytest.mark.vllm
def test_a_rule_changes_no_text(tmp_path: Path) -> None:
    """Texts are equal, or until a tie; those of prompts with another first token never are, so that says something."""
    need_vllm()
    results = {
        one["name"]: one["value"] for one in compared(tmp_path, "slide_batching", num_requests=12, seed=1, budget_s=0.0)
    }
    assert results["same_choices"] == 1.0
    assert results["control_same_choices"] == 0.0


def choice(token: str, other: str, apart: float) -> Choice:
    """Return the choice of a token that is so much likelier than another."""
    return Choice(token, {token: -0.5, other: -0.5 - apart})


def test_texts_may_differ_after_a_tie_only() -> None:
    """From the first difference on nothing is compared; before it everything is."""
    start = choice("1", "2", 1.0)
    tie, other_tie = choice("3", "4", TIE_NATS / 2), choice("4", "3", TIE_NATS / 3)
    assert make_same_choices([start, tie, start], [start, other_tie, choice("9", "8", 2.0)])
    assert make_same_choices([start, tie], [start, tie])
    assert not make_same_choices([start, tie], [start])
    assert not make_same_choices([start, choice("3", "4", 2 * TIE_NATS)], [start, choice("4", "3", 2 * TIE_NATS)])
    assert not make_same_choices([tie], [choice("4", "5", TIE_NATS / 2)])
