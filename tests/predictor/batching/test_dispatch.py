"""The compiled loop calls the local scheduler whose number the engine carries, however many there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from predictor.batching import BATCHERS, Batcher, dispatcher_of, is_compiled, number_of
from predictor.compiled import kernel
from predictor.config import EngineConfig
from predictor.engine import Engine
from predictor.state import State
from tests.strategies import AFFINE

NUM_RULES = 20


def rule(number: int) -> Callable[[State], bool]:
    """Make a rule that records its number."""

    def schedule(state: State) -> bool:
        state.engine[0].num_steps = number
        return number % 2 == 1

    return schedule


def test_every_one_of_twenty_rules_is_called_by_its_number() -> None:
    """There is no limit on the number of local schedulers, and gaps in the numbers are allowed."""
    rules = {3 * number: kernel(rule(3 * number)) for number in range(NUM_RULES)}
    dispatch = dispatcher_of(rules)
    state = Engine(EngineConfig(), AFFINE).state
    for number in rules:
        state.engine[0].batcher = number
        assert dispatch(state) == (number % 2 == 1)
        assert state.engine[0].num_steps == number


def test_a_batcher_has_the_number_of_its_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is added keeps the numbers of those before it; one without a kernel is not compiled in."""
    numbers = [number_of(name) for name in BATCHERS]
    assert numbers == list(range(len(BATCHERS)))
    monkeypatch.setitem(BATCHERS, "in_python", Batcher(schedule=rule(0)))
    assert [number_of(name) for name in BATCHERS] == [*numbers, len(numbers)]
    assert not is_compiled(BATCHERS["in_python"])
