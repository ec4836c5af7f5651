"""A real vLLM engine with a batching rule chooses the same tokens as one without, except at ties."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compare_vllm_rules import TIE_NATS, Choice, choose_alike, compared
from tests.deploy.engines import need_vllm


@pytest.mark.vllm
def test_texts_with_a_rule_differ_at_ties_only(tmp_path: Path) -> None:
    """Texts of the same prompts agree; as a control, those of prompts with another first token do not."""
    need_vllm()
    results = {
        one["name"]: one["value"] for one in compared(tmp_path, "slide_batching", num_requests=12, seed=1, budget_s=0.0)
    }
    assert results["same_choices"] == 1.0
    assert results["control_same_choices"] == 0.0


def choice(token: str, other: str, apart: float) -> Choice:
    """Return the choice of a token that is so much likelier than another."""
    return Choice(token, {token: -0.5, other: -0.5 - apart})


def test_choices_are_compared_until_a_tie() -> None:
    """Texts agree where they are equal up to a first difference at which both engines find the same two tokens likely."""
    start = choice("1", "2", 1.0)
    tie, other_tie = choice("3", "4", TIE_NATS / 2), choice("4", "3", TIE_NATS / 3)
    assert choose_alike([start, tie, start], [start, other_tie, choice("9", "8", 2.0)])
    assert choose_alike([start, tie], [start, tie])
    assert not choose_alike([start, tie], [start])
    assert not choose_alike([start, choice("3", "4", 2 * TIE_NATS)], [start, choice("4", "3", 2 * TIE_NATS)])
    assert not choose_alike([tie], [choice("4", "5", TIE_NATS / 2)])
