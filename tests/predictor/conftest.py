"""Marks as slow what repeats for one more local scheduler what others of its kind have shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategies import ORDERED

FOLDER = Path(__file__).parent
QUICK = ("deadline_forecast",)  # of the rules that order all requests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the other rules; `make slow` runs them."""
    for item in items:
        if not item.path.is_relative_to(FOLDER):  # pytest passes all tests of the run
            continue
        arguments = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        rule = arguments.get("batcher")
        if rule in ORDERED and (rule not in QUICK or arguments.get("policy") == "priority"):
            item.add_marker(pytest.mark.slow)
