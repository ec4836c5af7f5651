"""The numbers by which the compiled loop calls local schedulers."""

from __future__ import annotations

import pytest

from predictor.batching import BATCHERS, Batcher, is_compiled, number_of
from predictor.state import State


def in_python(state: State) -> bool:
    """Fill a step with nothing."""
    return not state.engine[0].num_steps


def test_a_batcher_has_the_number_of_its_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is added keeps the numbers of those before it; one without a kernel is not compiled in."""
    numbers = [number_of(name) for name in BATCHERS]
    assert numbers == list(range(len(BATCHERS)))
    monkeypatch.setitem(BATCHERS, "in_python", Batcher(schedule=in_python))
    assert [number_of(name) for name in BATCHERS] == [*numbers, len(numbers)]
    assert not is_compiled(BATCHERS["in_python"])
