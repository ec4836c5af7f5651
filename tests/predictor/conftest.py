"""Marks as slow what repeats a test for one more local scheduler, or for one more variant of the quick one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategies import ORDERED

FOLDER = Path(__file__).parent
QUICK = ("deadline_forecast",)  # of the rules that order all requests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the other rules and variants; `make slow` runs them."""
    for item in items:
        if not item.path.is_relative_to(FOLDER):  # pytest passes all tests of the run
            continue
        arguments = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        rule = arguments.get("batcher")
        is_variant = arguments.get("policy") == "priority" or arguments.get("is_async") is True
        if rule in ORDERED and (rule not in QUICK or is_variant):
            item.add_marker(pytest.mark.slow)
