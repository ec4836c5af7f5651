"""The mirror changes its engine model by named operations only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import predictor.mirror
from predictor.batching import BATCHERS
from predictor.mirror.engine_kinds import ADAPTER_BATCHERS

SOURCES = sorted(Path(predictor.mirror.__file__).parent.glob("*.py"))
ARRAYS = {"state", "_row", "_entries", "_requests", "_visible"}  # of an engine, and ways to them


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_mirror_does_not_touch_an_engines_arrays(source: Path) -> None:
    """`predictor.editable_engine` has an operation for each correction; imports are checked by import-linter."""
    tree = ast.parse(source.read_text())
    found = [
        f"line {node.lineno}: .{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ARRAYS
    ]
    assert not found


def test_the_mirror_knows_which_local_schedulers_limit_adapters() -> None:
    """It may not import their table."""
    assert set(ADAPTER_BATCHERS) == {name for name, batcher in BATCHERS.items() if batcher.has_inputs}
