"""Which LoRA adapters the engines of a simulated cluster have in memory, read from their state when a policy asks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from predictor.request import NO_ADAPTER
from predictor.state import RUNNING, WAITING
from scheduler.adapters import AdapterIndex
from scheduler.columns import Column
from simulator.fleet_arrays import EngineArrays


class FleetAdapters(AdapterIndex):
    """An index that is never out of date; instances are in the order of the fleet."""

    def __init__(self, fleet: Callable[[], EngineArrays]) -> None:
        """Read the fleet that a function returns."""
        super().__init__()
        self._fleet = fleet

    def active(self, number: int, instance_ids: tuple[str, ...]) -> Column:
        """Return 1 for instances that have an adapter in GPU memory, or where a request asks for it, else 0."""
        if number == NO_ADAPTER:
            return np.ones(len(instance_ids))
        stack = self._fleet().stack
        status = stack.requests.status
        asked = (stack.facts.adapter == number) & ((status == RUNNING) | (status == WAITING))
        in_slot = (stack.adapters.number == number) & (stack.adapters.is_active > 0)
        return np.asarray(asked.any(axis=1) | in_slot.any(axis=1), np.float64)

    def loaded(self, number: int, instance_ids: tuple[str, ...]) -> Column:
        """Return 1 for instances that have an adapter in GPU or host memory, else 0."""
        if number == NO_ADAPTER:
            return np.ones(len(instance_ids))
        return np.asarray((self._fleet().stack.adapters.number == number).any(axis=1), np.float64)
