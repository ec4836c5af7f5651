"""Kernels that are compiled by several processes at the same time."""

from __future__ import annotations

import pytest

from predictor.batching import BATCHERS
from services.compilation import compile_rules, compiling_beside


def test_rules_that_are_in_the_cache_are_not_compiled_again() -> None:
    """`block warm` has run before the tests."""
    steps: list[None] = []
    assert compile_rules(0, 8, lambda: steps.append(None))
    assert len(steps) == len(range(0, len(BATCHERS), 8))


def test_a_process_that_fails_is_named() -> None:
    """There is no part of nothing."""
    with pytest.raises(RuntimeError, match="part 1/0"), compiling_beside(["1/0"]):
        pass
