"""The arrays of an engine model, viewed without the cost of record arrays."""

from __future__ import annotations

import math

import numpy as np

from predictor.engine import Engine


class StateArrays:
    """The head of an engine's state, its steps, and its requests by slot."""

    def __init__(self, engine: Engine) -> None:
        """View the arrays of an engine."""
        self._engine = engine
        self.bind()

    def bind(self) -> None:
        """Bind the engine's arrays, which it replaces when they grow."""
        state = self._engine.state
        self.head = state.engine.view(np.ndarray)
        self.steps = state.steps.view(np.ndarray)
        self.rows = state.requests.view(np.ndarray)
        self._pending = state.pending

    @property
    def now_s(self) -> float:
        """Return the time to which the engine has advanced."""
        return float(self.head["now_s"][0])

    @property
    def num_steps(self) -> int:
        """Return the number of steps that were planned."""
        return int(self.head["num_steps"][0])

    @property
    def num_in_flight(self) -> int:
        """Return the number of steps under way."""
        return int(self.head["num_in_flight"][0])

    @property
    def end_of_oldest_s(self) -> float:
        """Return when the oldest step under way ends."""
        return float(self.steps["end_s"][int(self.head["oldest"][0])])

    @property
    def next_arrival_s(self) -> float:
        """Return when the next request arrives that the engine's clock has not reached; infinity for none."""
        if not self.head["num_pending"][0]:
            return math.inf
        return float(self.rows["arrival_s"][self._pending[self.head["pending_head"][0]]])

    def arrive_by(self, time_s: float) -> list[int]:
        """Have all requests arrive at this time at the latest; return the slots of those that arrive earlier now."""
        first, count = int(self.head["pending_head"][0]), int(self.head["num_pending"][0])
        if not count:
            return []
        slots = self._pending[(first + np.arange(count)) % len(self._pending)]
        later: list[int] = slots[self.rows["arrival_s"][slots] > time_s].tolist()
        self.rows["arrival_s"][later] = time_s
        return later

    @property
    def adapter_loads(self) -> tuple[int, int]:
        """Return how many adapters were loaded so far, into host memory and into GPU slots."""
        return int(self.head["num_adapter_loads"][0]), int(self.head["num_adapter_activations"][0])
